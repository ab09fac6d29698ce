"""A stage of a network whose forward torch.fx cannot read: it runs the whole forward, and computes its own part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import first_tensor, tensors
from trainer.parallel.module_units import ancestors
from trainer.parallel.pipeline.fake_forward import (
    ArgumentKey,
    FakeForward,
    TensorSubstitutions,
    copy_step,
    fake_tensors,
    get_argument,
    has_values,
    siblings,
)
from trainer.parallel.pipeline.fx_trace import NETWORK

# What a module is for a stage. "local": it lies in this stage. "remote": it lies in another one. "opened": its code
# runs in this stage, and each child has a kind of its own: a cut is inside it, or it has no parameters, or those of
# several stages.
ModuleKind = Literal["local", "remote", "opened"]
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # where a module keeps its tensors


def make_untraced_stages(
    step: nn.Module, cuts: list[str], example: Any, held: Collection[int], may_draw: bool
) -> dict[int, nn.Module]:
    """The wanted stages of a network by their numbers. CannotCut where the network cannot be cut so.

    cuts: the first module of each stage after the first. example: (inputs, targets), for a forward on shapes.
    may_draw: what is drawn is the same in all stages.
    """
    facts = FakeForward(step, cuts, example, may_draw)
    device = first_tensor(example).device
    return {number: UntracedStage(step, cuts, facts, number, device) for number in held}


class _StageEnd(BaseException):
    """Ends a forward where the next stage begins. No Exception, which a network's own code might catch."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


class UntracedStage(nn.Module):
    """A stage that runs the network's own code from its beginning to where the next stage begins.

    It runs in a copy of the network's modules. The tensors of other stages are fake there: they have shapes and no
    values, so nothing can be computed with them unnoticed. When the stage's first module is called, what was received
    takes the place of the fake values. When the next stage's first module is called, its arguments are handed on.

    As a module it has what the stage holds, under the network's names.
    """

    _step: nn.Module  # the copy; not registered, because names here are those inside of its network

    def __init__(self, step: nn.Module, cuts: list[str], facts: FakeForward, number: int, device: torch.device) -> None:
        super().__init__()
        network = step.get_submodule(NETWORK)
        ends = cuts[max(number - 1, 0) : number + 1]  # where the stage begins, and where the next one does
        kinds = _module_kinds(network, facts.owner, number, ends)
        # what was received comes in at the first module of the stage; those beside it may be given it, too
        beside = siblings(network, ends[0]) if number else []
        received = {ends[0]: facts.handed_on[number - 1]} if number else {}  # which arguments of the first module
        entries = {name: received.get(name, []) for name in beside if kinds[name] != "remote"}
        # the stage's modules are themselves in the copy, but for entries; fakes stand for the tensors of all others
        instead: dict[Any, Any] = {**fake_tensors(network, device)}
        for name, kind in kinds.items():
            module = network.get_submodule(name)
            if kind == "local" and name not in entries:
                instead[module] = module
            elif kind == "opened":  # masks and tables that lie between blocks every stage has
                instead |= {buffer: buffer for buffer in module.buffers(recurse=False)}
                instead |= {p: p for p in module.parameters(recurse=False) if facts.owner[p] == number}
        self._substitutions = TensorSubstitutions()
        self._received: tuple[Tensor, ...] = ()
        vars(self)["_step"] = copy_step(step, instead)
        inner = self._step.get_submodule(NETWORK)
        self._replace_forwards(network, inner, kinds, entries)
        if number < len(cuts):
            next_first = inner.get_submodule(cuts[number])
            vars(next_first)["forward"] = partial(self._leave, facts.handed_on[number])
        self._register_state(network, inner, kinds)

    def _replace_forwards(
        self, network: nn.Module, inner: nn.Module, kinds: dict[str, ModuleKind], entries: dict[str, list[ArgumentKey]]
    ) -> None:
        """Give modules of the copy other forwards: those of other stages give shapes, entries take what came in."""
        self._entered: list[tuple[nn.Module, nn.Module]] = []  # a module of the copy, the stage's module behind it
        for name, kind in kinds.items():
            module = inner.get_submodule(name)
            if kind == "remote":
                vars(module)["forward"] = partial(_remote_forward, module.forward, {})
            elif name in entries:
                behind = network.get_submodule(name) if kind == "local" else module.forward
                self._entered += [(module, network.get_submodule(name))] if kind == "local" else []
                vars(module)["forward"] = partial(self._enter, behind, name, entries[name])

    def _register_state(self, network: nn.Module, inner: nn.Module, kinds: dict[str, ModuleKind]) -> None:
        """Register what is here: whole modules, and the tensors of those that are opened."""
        self._local: list[nn.Module] = []
        holders: dict[str, nn.Module] = {"": self}
        for name, kind in kinds.items():
            above, _, last = name.rpartition(".")
            if above not in holders:
                continue  # it comes with the module that it lies in, or not at all
            if kind == "local":
                self._local.append(network.get_submodule(name))
                holders[above].add_module(last, self._local[-1])
            elif kind == "opened":
                module = inner.get_submodule(name)
                for key, parameter in list(module.named_parameters(recurse=False)):
                    if not has_values(parameter):  # still there for the code, and no parameter of this stage
                        delattr(module, key)
                        vars(module)[key] = parameter
                holder = holders.setdefault(name, nn.Module())
                # the same tables: whoever shards a parameter puts another one in its place, for both
                vars(holder).update({table: vars(module)[table] for table in TABLES})
                if name:
                    holders[above].add_module(last, holder)

    def forward(self, inputs: Any, targets: Any, *received: Tensor) -> Any:
        """What the stage hands on, as a tuple; of the last one the step's output."""
        self._received, self._substitutions = received, TensorSubstitutions()
        try:
            output = self._step(inputs, targets)
        except _StageEnd as end:
            output = end.values
            end.__traceback__ = None  # its frames hold activations
        finally:
            self._received, self._substitutions = (), TensorSubstitutions()
        if not all(has_values(tensor) for tensor in tensors(output)):
            raise RuntimeError(
                "what a stage hands on needs what only an earlier stage knows and has not handed on: a value without a"
                " gradient, or hidden states of earlier blocks in the network's output"
            )
        return output

    def _enter(self, forward: Callable[..., Any], name: str, keys: list[ArgumentKey], *args: Any, **kwargs: Any) -> Any:
        """Call the stage's first module, or one beside it: what was received takes the place of fake arguments."""
        for key, value in zip(keys, self._received if keys else (), strict=True):
            self._substitutions.put(get_argument(key, args, kwargs), value)
        args, kwargs = self._substitutions.apply(args, kwargs)
        if keys and not all(has_values(tensor) for tensor in tensors((args, kwargs))):
            raise RuntimeError(f"{name} is given what only an earlier stage knows and has not handed on")
        return forward(*args, **kwargs)

    def _leave(self, keys: list[ArgumentKey], *args: Any, **kwargs: Any) -> Any:
        """The next stage's first module is called: hand on the arguments that need gradients."""
        args, kwargs = self._substitutions.apply(args, kwargs)
        raise _StageEnd(tuple(get_argument(key, args, kwargs) for key in keys))

    def train(self, mode: bool = True) -> UntracedStage:
        """Set the mode as the network's own train() does it."""
        super().train(mode)
        self._step.train(mode)
        for entry, module in self._entered:
            module.training = entry.training
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the stage's modules one by one; the code between them stays Python."""
        for module in self._local:
            module.compile(*args, **kwargs)


def _module_kinds(
    network: nn.Module, owner: dict[nn.Parameter, int], number: int, ends: Collection[str]
) -> dict[str, ModuleKind]:
    """Name of each module → its kind for this stage. ends: the stage's first module, and the next stage's."""
    between = {above for end in ends for above in ancestors(end)}  # a cut is inside them: their code runs
    kinds: dict[str, ModuleKind] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        above = kinds.get(name.rpartition(".")[0], "opened")
        stages = {owner[parameter] for parameter in module.parameters()}
        if above != "opened":
            kinds[name] = above
        elif name in between or not stages or (number in stages and len(stages) > 1):
            kinds[name] = "opened"
        else:
            kinds[name] = "local" if number in stages else "remote"
    return kinds


def _remote_forward(forward: Callable[..., Any], known: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module of another stage, for shapes alone. known: shapes of arguments → the output, from earlier calls."""
    key = tuple((tensor.shape, tensor.dtype, has_values(tensor)) for tensor in tensors((args, kwargs)))
    if key in known:
        return known[key]
    output = forward(*args, **kwargs)
    # what has values comes from this batch, and must not be kept for the next one
    values = output if type(output) is tuple else (output,)
    if all(value is None or (isinstance(value, Tensor) and not has_values(value)) for value in values):
        known[key] = output
    return output
