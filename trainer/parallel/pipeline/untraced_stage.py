"""One stage of a network whose forward cannot be read: it runs the whole forward, and computes its own part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import first_tensor, tensors
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
from trainer.parallel.units import ancestors

ModuleKind = Literal["own", "elsewhere", "opened"]  # of this stage; of others; what runs between
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # where a module keeps its tensors


def make_untraced_stages(
    step: nn.Module, cuts: list[str], example: Any, held: Collection[int], may_draw: bool
) -> dict[int, nn.Module]:
    """These stages of a network, each with what it needs of it. Uncut where the network cannot be cut so.

    cuts: the first module of each stage after the first. example: (inputs, targets), for a forward on shapes.
    may_draw: what is drawn is the same in all stages.
    """
    trial = FakeForward(step, cuts, example, may_draw)
    device = first_tensor(example).device
    return {number: UntracedStage(step, cuts, trial, number, device) for number in held}


class _StageEnd(BaseException):
    """Ends a forward where the next stage begins. No Exception, which a network's own code might catch."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


class UntracedStage(nn.Module):
    """A stage that runs the network's own code from its beginning to where the next stage begins.

    What lies in other stages has shapes there and no values, so nothing can come of it unnoticed. Where the stage's
    first module is called, what was handed on takes the place of such a shape.

    As a module it has what is its own, under the network's names; what lies between has no code here, as in a graph's.
    """

    _step: nn.Module  # not registered: names here are those inside of its network

    def __init__(self, step: nn.Module, cuts: list[str], trial: FakeForward, number: int, device: torch.device) -> None:
        super().__init__()
        network = step.get_submodule(NETWORK)
        ends = cuts[max(number - 1, 0) : number + 1]  # where the stage begins, and where the next one does
        kinds = _module_kinds(network, trial.owner, number, ends)
        first, opens = (ends[0], siblings(network, ends[0])) if number else ("", [])
        doors = [name for name in opens if kinds[name] != "elsewhere"]
        # a copy of the network's modules, in which the stage's own are themselves, and all tensors of others shapes
        instead: dict[Any, Any] = {**fake_tensors(network, device)}
        for name, kind in kinds.items():
            module = network.get_submodule(name)
            if kind == "own" and name not in doors:
                instead[module] = module
            elif kind == "opened":  # masks and tables that lie between blocks every stage has
                instead |= {buffer: buffer for buffer in module.buffers(recurse=False)}
                instead |= {one: one for one in module.parameters(recurse=False) if trial.owner[one] == number}
        copy = copy_step(step, instead)
        inner = copy.get_submodule(NETWORK)
        for name, kind in kinds.items():
            if kind == "elsewhere":
                module = inner.get_submodule(name)
                vars(module)["forward"] = partial(_remote_forward, module.forward, {})
        # in place of its first module, and of what stands beside it, the copy has doors to them
        self._doors: list[tuple[nn.Module, nn.Module]] = []
        for name in doors:
            door, own = inner.get_submodule(name), network.get_submodule(name)
            self._doors += [(door, own)] if kinds[name] == "own" else []
            given = trial.places[number - 1] if name == first else []
            vars(door)["forward"] = partial(self._enter, own if kinds[name] == "own" else door.forward, name, given)
        # and in place of the next stage's first module the way out
        if number < len(cuts):
            vars(inner.get_submodule(cuts[number]))["forward"] = partial(self._leave, trial.places[number])
        self._stead = TensorSubstitutions()
        self._received: tuple[Tensor, ...] = ()
        vars(self)["_step"] = copy
        self._hold(network, inner, kinds)

    def _hold(self, network: nn.Module, inner: nn.Module, kinds: dict[str, ModuleKind]) -> None:
        """Register what is here: whole modules, and the tensors of those that are not."""
        self._own: list[nn.Module] = []
        holders: dict[str, nn.Module] = {"": self}
        for name, kind in kinds.items():
            above, _, last = name.rpartition(".")
            if above not in holders:
                continue  # it comes with the module that it lies in, or not at all
            if kind == "own":
                self._own.append(network.get_submodule(name))
                holders[above].add_module(last, self._own[-1])
            elif kind == "opened":
                module = inner.get_submodule(name)
                for one, parameter in list(module.named_parameters(recurse=False)):
                    if not has_values(parameter):  # still there for the code, and no parameter of this stage
                        delattr(module, one)
                        vars(module)[one] = parameter
                holder = holders.setdefault(name, nn.Module())
                # the same tables, for who spreads a parameter puts another one in its place
                vars(holder).update({table: vars(module)[table] for table in TABLES})
                if name:
                    holders[above].add_module(last, holder)

    def forward(self, inputs: Any, targets: Any, *received: Tensor) -> Any:
        """What the stage hands on, as a tuple; of the last one the step's output."""
        self._received, self._stead = received, TensorSubstitutions()
        try:
            output = self._step(inputs, targets)
        except _StageEnd as leaving:
            output = leaving.values
            leaving.__traceback__ = None  # its frames hold activations
        finally:
            self._received, self._stead = (), TensorSubstitutions()
        if not all(has_values(tensor) for tensor in tensors(output)):
            raise RuntimeError(
                "what a stage hands on needs what only an earlier stage knows and has not handed on: a value without a"
                " gradient, or hidden states of earlier blocks in the network's output"
            )
        return output

    def _enter(self, own: Callable[..., Any], name: str, places: list[ArgumentKey], *args: Any, **kwargs: Any) -> Any:
        """The stage's first module is called, or one beside it: with what was received, in the place of shapes."""
        for place, value in zip(places, self._received if places else (), strict=True):
            self._stead.put(get_argument(place, args, kwargs), value)
        args, kwargs = self._stead.into(args, kwargs)
        if places and not all(has_values(tensor) for tensor in tensors((args, kwargs))):
            raise RuntimeError(f"{name} is given what only an earlier stage knows and has not handed on")
        return own(*args, **kwargs)

    def _leave(self, places: list[ArgumentKey], *args: Any, **kwargs: Any) -> Any:
        """The next stage's first module is called: what it is given is what is handed on."""
        args, kwargs = self._stead.into(args, kwargs)
        raise _StageEnd(tuple(get_argument(place, args, kwargs) for place in places))

    def train(self, mode: bool = True) -> UntracedStage:
        """As the network's own train() does it."""
        super().train(mode)
        self._step.train(mode)
        for door, own in self._doors:
            own.training = door.training
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what is here piece by piece; what runs between is Python's."""
        for module in self._own:
            module.compile(*args, **kwargs)


def _module_kinds(
    network: nn.Module, owner: dict[nn.Parameter, int], number: int, ends: Collection[str]
) -> dict[str, ModuleKind]:
    """Of what kind each module is for a stage. ends: its first module, and the next stage's."""
    between = {above for end in ends for above in ancestors(end)}  # their code runs, whosever they are
    kinds: dict[str, ModuleKind] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        above = kinds.get(name.rpartition(".")[0], "opened")
        stages = {owner[parameter] for parameter in module.parameters()}
        if above != "opened":
            kinds[name] = above
        elif name in between or not stages or (number in stages and len(stages) > 1):
            kinds[name] = "opened"
        else:
            kinds[name] = "own" if number in stages else "elsewhere"
    return kinds


def _remote_forward(forward: Callable[..., Any], known: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """What a module of another stage gives, in shapes; those of arguments that were seen before are known."""
    key = tuple((tensor.shape, tensor.dtype, has_values(tensor)) for tensor in tensors((args, kwargs)))
    if key in known:
        return known[key]
    output = forward(*args, **kwargs)
    # nothing of the batch's own may be kept
    each = output if type(output) is tuple else (output,)
    if all(one is None or (isinstance(one, Tensor) and not has_values(one)) for one in each):
        known[key] = output
    return output
