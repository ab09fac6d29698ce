"""Stages as modules: each runs the whole forward, and computes its own part. All stages of one rank as one module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import first_tensor, tensors
from trainer.parallel.module_units import ancestors
from trainer.parallel.pipeline.fake_forward import (
    NETWORK,
    ArgumentKey,
    FakeForward,
    TensorSubstitutions,
    copy_step,
    fake_tensors,
    get_argument,
    has_values,
    siblings,
)

# What a module is for a stage. "local": it lies in this stage. "remote": it lies in another one. "opened": its code
# runs in this stage, and each child has a kind of its own: a cut is inside it, or it has no parameters, or those of
# several stages.
ModuleKind = Literal["local", "remote", "opened"]
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # where a module keeps its tensors
HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # and what runs before and after its forward


def make_stages(
    step: nn.Module, cuts: list[str], example: Any, held: Collection[int], may_draw: bool
) -> dict[int, nn.Module]:
    """The wanted stages of a network by their numbers. CannotCut where the network cannot be cut so.

    cuts: the first module of each stage after the first. example: (inputs, targets), for a forward on shapes.
    may_draw: what is drawn is the same in all stages.
    """
    facts = FakeForward(step, cuts, example, may_draw)
    device = first_tensor(example).device
    return {number: NetworkStage(step, cuts, facts, number, device) for number in held}


class _StageEnd(BaseException):
    """Ends a forward where the next stage begins. No Exception, which a network's own code might catch."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


class NetworkStage(nn.Module):
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
        self._writes = number > 0 and facts.writes[number - 1]
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
                behind: Callable[..., Any] = module.forward
                if kind == "local":
                    behind = network.get_submodule(name)
                    self._entered.append((module, behind))
                    for table in HOOKS:  # the module behind has them, and they run once
                        vars(module)[table].clear()
                vars(module)["forward"] = partial(self._enter, behind, name, entries[name])

    def _register_state(self, network: nn.Module, inner: nn.Module, kinds: dict[str, ModuleKind]) -> None:
        """Register what is here: whole modules, and the tensors of those that are opened."""
        self._local: dict[str, nn.Module] = {}
        holders: dict[str, nn.Module] = {"": self}
        for name, kind in kinds.items():
            above, _, last = name.rpartition(".")
            if above not in holders:
                continue  # it comes with the module that it lies in, or not at all
            if kind == "local":
                self._local[name] = network.get_submodule(name)
                holders[above].add_module(last, self._local[name])
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
            # autograd forbids writing into what it began with
            self._substitutions.put(get_argument(key, args, kwargs), value.clone() if self._writes else value)
        args, kwargs = self._substitutions.apply(args, kwargs)
        if keys and not all(has_values(tensor) for tensor in tensors((args, kwargs))):
            raise RuntimeError(f"{name} is given what only an earlier stage knows and has not handed on")
        return forward(*args, **kwargs)

    def _leave(self, keys: list[ArgumentKey], *args: Any, **kwargs: Any) -> Any:
        """The next stage's first module is called: hand on the arguments that need gradients."""
        args, kwargs = self._substitutions.apply(args, kwargs)
        raise _StageEnd(tuple(get_argument(key, args, kwargs) for key in keys))

    def train(self, mode: bool = True) -> NetworkStage:
        """Set the mode as the network's own train() does it."""
        super().train(mode)
        self._step.train(mode)
        for entry, module in self._entered:
            module.training = entry.training
        return self

    def compiled_parts(self) -> dict[str, nn.Module]:
        """What is compiled as a whole, by name: the code between these modules stays Python."""
        return self._local


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


class RankStages(nn.Module):
    """The stages that one rank holds, as one module: everything stands under the network's own names.

    order: the names of the network's modules. They come in this order, so that of tied weights the same name is first.
    """

    def __init__(self, stages: Sequence[nn.Module], order: Sequence[str]) -> None:
        super().__init__()
        self._order = {name: at for at, name in enumerate(order)}
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module under its name in the network; parameters and buffers follow from this."""
        memo = set() if memo is None else memo
        yield prefix, self
        # one tree of names out of several stages, which have bare holders of the same names
        held = [pair for stage in self.children() for pair in stage.named_modules(memo, "", remove_duplicate)]
        for name, module in sorted(held, key=lambda pair: self._order.get(pair[0], len(self._order))):
            yield f"{prefix}.{name}".strip("."), module

    def __getattr__(self, name: str) -> Any:
        """A module of the network. AttributeError, in words, where another rank has it."""
        # torch's own lookup first: parameters, buffers and the stages themselves
        with suppress(AttributeError):
            return super().__getattr__(name)
        with suppress(AttributeError):
            return self.get_submodule(name)
        held = ", ".join(sorted({held.split(".")[0] for held, _ in self.named_modules() if held}))
        raise AttributeError(
            f"{name}: this rank of a pipeline holds these of the network only: {held}; a task's after_step finds what"
            " is there by network.named_parameters()"
        )

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name. AttributeError where no stage here has it."""
        for name, module in self.named_modules():
            if name == target:
                return module
        raise AttributeError(f"no stage of this rank has a module {target}")

    def state_dict(  # type: ignore[override]  # the base also takes positions, which torch has deprecated
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What all stages here hold, under the network's own names."""
        held: dict[str, Any] = {} if destination is None else destination
        for stage in self.children():
            held.update(stage.state_dict(prefix=prefix, keep_vars=keep_vars))
        return held

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over the values of all stages here; what other ranks hold is passed over."""
        for stage in self.children():
            values = stage.state_dict()  # it also holds the versions of modules, which some ask for
            for name in values.keys() - state_dict.keys():
                del values[name]
            values.update({name: state_dict[name] for name in values})
            stage.load_state_dict(values, strict, assign)
