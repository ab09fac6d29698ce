"""Networks built without memory, whose values come later, one tensor after the other, as the usual construction's.

`deferred` runs a constructor on the meta device and records its tensor operations (`trainer/deferral/`); `materialise`
carries them out on the CPU in a way that holds few values at a time.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.deferral.functions import Functions
from trainer.deferral.operations import Operations
from trainer.deferral.recording import NotDeferrable, Recorder
from trainer.deferral.replay import Operation, Place, needed, replay
from trainer.refusal import Refusal

__all__ = ["NotDeferrable", "deferred", "is_deferred", "materialise", "ties"]


@dataclass
class _Record:
    """How the values of a network come about."""

    operations: list[Operation]
    draws: set[Operation]  # must take place even where nobody needs their numbers
    places: dict[str, Place]  # of parameters and buffers, without second names
    ties: dict[str, str]


_records: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()
_ties: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network on the meta device and remember how each of its values comes about.

    torch's default generator decides the values and is left as it was; the ordinary construction would advance it.
    Python's and NumPy's generators are used for real. A value that the constructor asks for is computed at once, which
    costs time but no lasting memory. Tensors that are plain attributes get their values at once, and keep them.

    NotDeferrable in words where that cannot work, with all generators as before, so that `make()` can follow. Any error
    of the constructor but a Refusal counts as that: without the meta device it might not have come up. What it printed
    or counted elsewhere stays.
    """
    rewind = _generators()
    try:
        network, recorder = _recorded(make)
        _records[network] = record = _finish(network, recorder)
        _ties[network] = record.ties
    except Refusal:
        raise
    except Exception as error:
        rewind()
        raise NotDeferrable(_reason(error)) from error
    return network


def is_deferred(network: nn.Module) -> bool:
    """Was the network built by `deferred`, and has it not been through `materialise` yet?"""
    return network in _records


def ties(network: nn.Module) -> dict[str, str]:
    """Second names of parameters and buffers of a deferred network → the name `materialise` has for the same tensor."""
    return dict(_ties.get(network, {}))


def materialise(network: nn.Module, take: Callable[[str, Tensor], None]) -> None:
    """Compute the values of a deferred network: `take(name, tensor)` for each parameter and buffer, whole, on the CPU.

    `network` is the module that `deferred` returned, whatever has become of what is in it; names are those that it had
    then, of several names for one tensor the first (`ties` has the others). A tensor is handed over when it is final
    and nothing else needs it; afterwards it is freed, unless `take` keeps it. They come in no certain order, the same
    on every rank, so `take` may be collective. It must not draw from torch's default generator, which is as before in
    the end. Values that nobody initialises are zeros. Names that share memory without being one tensor become separate
    tensors, as they do on the way to a GPU.

    At one time there is about one tensor with what is computed of it; more where the constructor derives many tensors
    from one or one from many. ValueError where the network is not deferred, or has its values already.
    """
    record = _records.get(network)
    if record is None:
        raise ValueError(f"{type(network).__name__} was not built by deferred(), or has its values already")
    named = defaultdict(list)
    for name, place in record.places.items():
        named[place.storage].append((name, place))

    def hand_over(number: int, storage: torch.UntypedStorage) -> None:
        for name, place in named[number]:
            alone = len(named[number]) == 1 and place.fills(storage.nbytes())
            take(name, place.tensor(storage) if alone else place.tensor(storage).clone())

    state = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            replay(record.operations, [*named], hand_over, record.draws)
    finally:
        torch.default_generator.set_state(state)
    del _records[network]


# Building.


def _recorded(make: Callable[[], nn.Module]) -> tuple[nn.Module, Recorder]:
    """The network on the meta device, but for constants, and the record of its construction."""
    state = torch.default_generator.get_state()
    recorder = Recorder()
    try:
        with Functions(recorder), Operations(recorder):
            network = make()
    finally:
        torch.default_generator.set_state(state)
    if recorder.refused is not None:
        raise recorder.refused  # the constructor has swallowed it
    return network, recorder


def _finish(network: nn.Module, recorder: Recorder) -> _Record:
    """What must be kept of the record, now that the names are known."""
    _move_constants(network, recorder)
    first: dict[int, str] = {}  # identity of a tensor → its first name
    places: dict[str, Place] = {}
    tied: dict[str, str] = {}
    for name, tensor in _named(network):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
            continue
        if not recorder.knows(tensor):
            raise recorder.refusal(f"the constructor itself leaves {name} on the meta device")
        first[id(tensor)] = name
        places[name] = recorder.place(tensor)
    wanted = {place.storage for place in places.values()}
    for path, tensor in _attributes(network, set(first)):
        _give_value(path, tensor, recorder, wanted)
    draws = {recorder.operations[index] for index in recorder.draws.waiting}
    return _Record(needed(recorder.operations, wanted, draws), draws, places, tied)


def _named(network: nn.Module) -> list[tuple[str, Tensor]]:
    return [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]


def _move_constants(network: nn.Module, recorder: Recorder) -> None:
    """Parameters and buffers that are real, around a NumPy array as a rule, are replaced by tensors of the record."""
    twins: dict[int, Tensor] = {}
    named = _named(network)  # which keeps them alive, and so their identities apart
    for name, tensor in named:
        if is_lazy(tensor):
            raise recorder.refusal(f"{name} gets its shape in the first forward")
        if tensor.is_meta:
            continue
        if id(tensor) not in twins:
            with recorder.at_work():
                twin = recorder.adopt(tensor.detach().clone())
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, twins[id(tensor)])


def _give_value(path: str, tensor: Tensor, recorder: Recorder, registered: set[int]) -> None:
    """A plain attribute becomes real in place: it does not move with the network, so it is on the CPU for good."""
    if not tensor.is_meta or not recorder.knows(tensor):
        return
    if not tensor.is_leaf or recorder.place(tensor).storage in registered:
        raise recorder.refusal(
            f"{path} is neither parameter nor buffer, but shares memory with one or is computed of one"
        )
    value = recorder.value(tensor).clone().requires_grad_(tensor.requires_grad)
    is_parameter = isinstance(tensor, nn.Parameter)
    torch.utils.swap_tensors(tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)


def _attributes(network: nn.Module, registered: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a network holds in any other way than as parameter or buffer, and where."""
    seen = set(registered)
    left: list[tuple[str, Any]] = [(type(network).__name__, network)]
    while left:
        path, value = left.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, nn.Module):
            held = {
                **{key: one for key, one in vars(value).items() if key != "_modules"},
                **dict(value.named_children()),
            }
            left += [(f"{path}.{key}", one) for key, one in held.items()]
        elif isinstance(value, Mapping):
            left += [(path, one) for one in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += [(path, one) for one in value]
        elif isinstance(value, partial):
            left += [(path, value.args), (path, value.keywords)]
        else:
            left.append((path, getattr(value, "__dict__", None)))


# Refusing.


def _generators() -> Callable[[], None]:
    """A function that sets all generators back to where they are now."""
    python, own, numpy = random.getstate(), torch.default_generator.get_state(), sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None

    def rewind() -> None:
        random.setstate(python)
        torch.default_generator.set_state(own)
        if numpy is not None:
            numpy.random.set_state(legacy)

    return rewind


def _reason(error: Exception) -> str:
    """The error in words, with the innermost module that was being built."""
    module, trace = "the network", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "__init__" and isinstance(owner, nn.Module):
            module = type(owner).__name__
        trace = trace.tb_next
    text = str(error) if isinstance(error, NotDeferrable) else f"{type(error).__name__}: {error}"
    return f"{module} cannot be built without memory: {text}"
