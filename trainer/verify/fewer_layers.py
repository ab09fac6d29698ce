"""A network with fewer layers: of each list a few of each kind, which stand for all layers of that kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import map_tensors
from trainer.jobs.flops import forward_backward_copy, trainable_fakes
from trainer.jobs.preparation import prepare_network, seeded_network, small_example
from trainer.jobs.run_parts import PreparedRun
from trainer.learning.freezing import freeze
from trainer.learning.parallel_plan import Plan
from trainer.learning.parameter_patterns import Rule, matches_exactly
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.parallel.meta_model import build_meta_model, named_state
from trainer.parallel.module_units import ancestors, matching_modules

_LIST_TYPES = (nn.Sequential, nn.ModuleList)
_CPU = torch.device("cpu")
_SHOWN = 4  # kinds of a list in a line


@dataclass(frozen=True)
class KeptLayers:
    """What stays of a list of layers."""

    name: str  # of the list
    places: Sequence[int]  # of the layers that stay, from 0 on; the names of the fields are those in a reference
    kinds: Sequence[tuple[str, int, int]]  # of each: its class, how many stay, how many there are
    of: int  # layers in the whole list

    def __str__(self) -> str:
        shortened = [f"{few} of {every} {kind}" for kind, few, every in self.kinds if few < every]
        more = f" and {len(shortened) - _SHOWN} kinds more" if len(shortened) > _SHOWN else ""
        numbers = ", ".join(map(str, self.places))
        which = f"(of {self.of} layers these: {numbers})"
        return f"{self.name or 'the network'}: {', '.join(shortened[:_SHOWN])}{more} {which}"


def describe_kept(kept: Sequence[KeptLayers]) -> str:
    """What such a network is called, in a sentence."""
    if not kept:
        return ", and no list of its layers can be made shorter"
    return f" with fewer layers, either ({'; '.join(map(str, kept))})"


def kept_lines(kept: Sequence[KeptLayers], why: str) -> list[str]:
    """What was compared instead of the whole network, and why; nothing where it was the whole."""
    if why and not kept:
        return [f"note        all layers: no list has more of a kind that can be left out ({why})"]
    lines = [f"note        fewer layers, here and in the reference: {why}"] if why else []
    return lines + [f"            of {of_list}" for of_list in kept]


def select_layers(run: PreparedRun, each: int) -> list[KeptLayers]:
    """Which layers stay, so many of each kind in each list: the first and the last, and others between them.

    A list stays whole where the network, or its plan, cannot do without its layers. Of every layer that stays, what is
    learned in the whole network is learned in the shorter one.
    """
    network = run.network  # of one process: with values, as some forwards need them
    lists = [*_find_lists(network, run.task.plan(network), run.rules, each)]
    if not lists:
        return []
    forward = _ShortForward(run.task, network, small_example(run, run.training))
    if forward.works_with(lists):
        return lists
    kept: list[KeptLayers] = []  # list by list, as each may be the one that is missed
    for layers in lists:
        if forward.works_with([*kept, layers]):
            kept.append(layers)
    return kept


def shorten_network(run: PreparedRun, kept: Iterable[KeptLayers]) -> PreparedRun:
    """The same run, whose networks are made with these layers alone. What is frozen, or has its own rate, stays so.

    Refusal where the strategy cannot spread so short a network.
    """
    kept, make, settings = [*kept], run.make_network, run.settings
    if not kept:
        return run
    count, least = sum(len(layers.places) for layers in kept), run.strategy.least_layers(run.machine.launch.world_size)
    if count < least:  # blocks would be cut into pieces, unlike in the run itself
        raise Refusal(
            f"job=verify: {count} layers stay ({'; '.join(map(str, kept))}), and strategy={run.strategy.name} has"
            f" {least} stages: a layer for each is needed; job.layers={least} works"
        )
    frozen = settings.model.freeze

    def make_short() -> nn.Module:
        return remove_layers(freeze(make(), frozen), kept)  # before the names change

    renamed = _rename_rules(run.rules, build_meta_model(partial(seeded_network, run))[0], kept) if run.rules else []
    model, optimizer = replace(settings.model, freeze=()), replace(settings.optimizer, groups=tuple(renamed))
    run = replace(run, make_network=make_short, settings=replace(settings, model=model, optimizer=optimizer))
    # once more as the run itself was prepared: may the strategy spread the shorter one?
    return replace(run, **vars(prepare_network(run, partial(small_example, run, run.training))))


def remove_layers(network: nn.Module, lists: Iterable[KeptLayers]) -> nn.Module:
    """The network, in place, without the layers that do not stay; those behind them move up, and so do their names."""
    # lists inside of layers before the lists of these layers
    for list_kept in sorted(lists, key=lambda layers: len(layers.name), reverse=True):
        modules: Any = network.get_submodule(list_kept.name)
        entry_names = [name for name, _ in _entries(modules)]
        numbered = entry_names == [str(at) for at in range(len(entry_names))]
        # from the end, so that the numbers of the others stay right
        for at in reversed(range(len(entry_names))):
            if at not in list_kept.places:
                if numbered:
                    del modules[at]
                else:  # a Sequential that names its layers: they keep their names
                    delattr(modules, entry_names[at])
    return network


def _find_lists(network: nn.Module, plan: Plan, rules: list[Rule], per_kind: int) -> Iterator[KeptLayers]:
    """The lists that have more than so many layers of a kind. Where a plan has units, those of units alone."""
    lists = {name: module for name, module in network.named_modules() if isinstance(module, _LIST_TYPES)}
    planned = {
        name
        for name, module in lists.items()
        if any(matches_exactly(key, f"{name}.{word}".strip(".")) for key in plan.shard for word, _ in _entries(module))
    }
    removed = set[str]()  # the names of layers that do not stay
    for name, module in lists.items():
        if (planned and name not in planned) or not removed.isdisjoint(ancestors(name)):
            continue
        entries = _entries(module)
        positions: dict[Any, list[int]] = {}  # of the layers of each kind; what learns nothing always stays
        for at, (word, layer) in enumerate(entries):
            if any(True for _ in layer.parameters()):
                positions.setdefault(_layer_kind(f"{name}.{word}".strip("."), layer, rules), []).append(at)
        kept = {kind: _spaced(of_kind, per_kind) for kind, of_kind in positions.items()}
        left_out = {at for kind, of_kind in positions.items() for at in of_kind if at not in kept[kind]}
        if left_out:
            removed |= {f"{name}.{entries[at][0]}".strip(".") for at in left_out}
            # the class of the first module of a kind is that of the layer
            kinds = tuple(
                (kind[0][0][1].__name__, len(kept[kind]), len(of_kind)) for kind, of_kind in positions.items()
            )
            stay = tuple(at for at in range(len(entries)) if at not in left_out)
            yield KeptLayers(name, stay, kinds, len(entries))


def _entries(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module that stands in a list several times counts as often."""
    every = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    return [(word, module.get_submodule(word)) for word in every]


def _spaced(positions: list[int], count: int) -> list[int]:
    """So many of them: the first, the last, and others at equal distances."""
    if len(positions) <= count:
        return positions
    return [positions[round(at * (len(positions) - 1) / max(1, count - 1))] for at in range(count)]


def _layer_kind(name: str, layer: nn.Module, rules: list[Rule]) -> Any:
    """What layers of one kind have in common: classes, words and switches of all in it, and what it learns, and how."""
    modules = tuple((inner, type(module), _module_options(module)) for inner, module in layer.named_modules())
    parameters = tuple(
        (inner, x.shape, x.dtype, x.requires_grad, tuple(rule.applies_to(f"{name}.{inner}") for rule in rules))
        for inner, x in layer.named_parameters()
    )
    return modules, parameters, tuple((inner, x.shape, x.dtype) for inner, x in layer.named_buffers())


def _module_options(module: nn.Module) -> Any:
    """What else tells a module from another one of its class. Not its numbers: they count layers, or are rates."""
    if type(module).__module__.startswith("torch.nn.") and "Drop" not in type(module).__name__:
        return module.extra_repr()  # strides, groups
    options = vars(module).items()
    return tuple((key, value) for key, value in options if isinstance(value, bool | str) and not key.startswith("_"))


class _ShortForward:
    """A forward and a backward of the network, with fewer layers than it has: does it do what it did before?"""

    def __init__(self, task: Task, network: nn.Module, example: Any) -> None:
        self._task, self._network, self._example = task, network, example
        try:
            self._learned: set[Tensor] | None = _find_learned(
                task, network, example, trainable_fakes(network, torch.device("cpu"))
            )
        except Exception:  # a forward that looks at values: then it is run with them, as short as it is to be
            self._learned = None

    def works_with(self, kept: Iterable[KeptLayers]) -> bool:
        """Does the forward run, is of what stays the same learned, and does the plan find its modules?"""
        kept = [*kept]
        # modules of its own, with the same tensors; a layer that is called all the same is an error
        short = deepcopy(self._network, {id(x): x for _, x in named_state(self._network)})
        for layer in _removed_layers(short, kept):
            layer.register_forward_pre_hook(_refuse_call)
        short = remove_layers(short, kept)
        try:
            plan = self._task.plan(short)
            patterns = [*plan.tensor, *plan.shard, *plan.cuts, *plan.context]
            if not all(any(True for _ in matching_modules(short, key)) for key in patterns):
                return False
            if self._learned is None:
                _find_learned(self._task, short, self._example, {x: x for _, x in named_state(short)})
                return True
            learned = _find_learned(self._task, short, self._example, trainable_fakes(short, _CPU))
            return learned == self._learned & {*short.parameters()}
        except Exception:  # whatever a forward does without a layer that it counts on
            return False


def _find_learned(task: Task, network: nn.Module, example: Any, instead: Mapping[Tensor, Tensor]) -> set[Tensor]:
    """The parameters to which a gradient comes back, with these tensors in the place of the network's own."""
    # a copy of the batch, too: a forward may write into it
    forward_backward_copy(task, network, instead, map_tensors(example, torch.clone))
    return {value for value, other in instead.items() if other.grad is not None}


def _removed_layers(network: nn.Module, lists: Iterable[KeptLayers]) -> list[nn.Module]:
    """The layers that do not stay, and are nowhere else among those that do."""
    stay, removed = set[nn.Module](), list[nn.Module]()
    for kept in lists:
        for at, (_, layer) in enumerate(_entries(network.get_submodule(kept.name))):
            if at in kept.places:
                stay.add(layer)
            else:
                removed.append(layer)
    return [layer for layer in removed if layer not in stay]


def _refuse_call(module: nn.Module, given: Any) -> None:
    """A hook of a layer that is left out: who calls it all the same holds it in a way of its own."""
    raise RuntimeError(f"{type(module).__name__} is called from outside of its list")


def _rename_rules(rules: list[Rule], network: nn.Module, kept: Iterable[KeptLayers]) -> list[Rule]:
    """The rules for the network without these layers: for the same parameters, whatever they are called there."""
    before: dict[Tensor, list[str]] = {}  # the names of each tensor; a tied weight has several
    for name, x in network.named_parameters(remove_duplicate=False):
        before.setdefault(x, []).append(name)
    short = remove_layers(network, kept)
    renamed: list[Rule] = []
    for rule in rules:
        learning = ((name, x) for name, x in short.named_parameters() if x.requires_grad)
        meant_names = [(name, any(map(rule.applies_to, before[x]))) for name, x in learning]
        # its pattern may fit the new names as well; if not, the rule becomes one for each parameter
        if all(rule.applies_to(name) == meant for name, meant in meant_names):
            renamed += [replace(rule, resolved=())] if any(meant for _, meant in meant_names) else []
        else:
            renamed += [replace(rule, pattern=name, resolved=()) for name, meant in meant_names if meant]
    return renamed
