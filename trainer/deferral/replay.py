"""Recorded tensor operations carried out later: those that are needed, and each value freed after its last use.

Values belong to storages, not tensors: views, in-place writes and `.data` come right by themselves. Where an operation
overwrites a whole storage, a new *version* of it begins; the old one may be freed early, or never be computed at all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trainer.tree import tensors


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a storage by its number, and the tensor's layout in it (in elements)."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies here, if this is the storage."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)

    def fills(self, size: int) -> bool:
        """Does it cover a storage of `size` bytes, each element once?"""
        expected = 1
        for stride, length in sorted(zip(self.stride, self.size, strict=True)):
            if length != 1 and stride != expected:
                return math.prod(self.size) == size == 0
            expected *= length
        return self.offset == 0 and expected * self.dtype.itemsize == size


@dataclass(eq=False)
class Operation:
    """One operation on tensors, which stand in its arguments as places. Storages are numbers, sizes are bytes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    reads: set[int]  # what must hold its values before
    writes: dict[int, int] = field(default_factory=dict)  # storage → size: changed in part, or out of what it was
    overwrites: dict[int, int] = field(default_factory=dict)  # storage → size: wholly, whatever it was
    creates: dict[int, int] = field(default_factory=dict)  # storage → size: of results
    results: list[Place | None] = field(default_factory=list)  # of returned tensors; None: its storage was there before
    empty: bool = False  # it creates memory without values
    draws: bool = False  # from torch's default generator
    generator: torch.Generator | None = None  # or from this one
    state: Tensor | None = None  # of the generator before it; None: as the operation before it that draws left it
    float_type: torch.dtype = torch.float32  # the default one at that time


@dataclass(eq=False)
class _Step:
    """An operation that is carried out: with versions for storages, and who waits for it."""

    operation: Operation
    versions: dict[int, int]
    followers: list[_Step] = field(default_factory=list)
    waits_for: int = 0
    done: bool = False


def replay(
    operations: Sequence[Operation],
    wanted: Iterable[int],
    hand_over: Callable[[int, torch.UntypedStorage], None],
    forced: Collection[Operation] = (),
    drawn: Callable[[Operation], None] | None = None,
) -> None:
    """Compute storages on the CPU and hand each over, by its number, as soon as nothing changes or reads it any more.

    `forced` operations run even where nobody needs their result: the generator must come by. `drawn` hears of each one
    that drew from the default generator, which is left as the last of them leaves it. What draws runs in order of
    time; anything else as soon as its inputs are final, because that lets them go.
    """
    steps, finals = _plan(operations, wanted, forced)
    _link(steps)
    uses = Counter(version for step in steps for version in set(step.versions.values()))
    storages: dict[int, torch.UntypedStorage] = {}
    for first in steps:
        ready = [] if first.done else [first]
        while ready:
            step = ready.pop()
            _carry_out(step, storages)
            if drawn is not None and step.operation.draws:
                drawn(step.operation)
            for version in set(step.versions.values()):
                uses[version] -= 1
                if not uses[version] and version in finals:
                    hand_over(finals[version], storages.pop(version))
                elif not uses[version]:
                    del storages[version]
            for later in step.followers:
                later.waits_for -= 1
                if not later.waits_for and not later.operation.draws:
                    ready.append(later)


def needed(operations: Sequence[Operation], wanted: Iterable[int], forced: Collection[Operation]) -> list[Operation]:
    """The operations that `replay` would carry out, in order of time."""
    return [step.operation for step in _plan(operations, wanted, forced)[0]]


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments with `change` applied to everything in them that is no list or tuple."""
    if isinstance(value, (list, tuple)):
        changed = [each(one, change) for one in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


def _plan(
    operations: Sequence[Operation], wanted: Iterable[int], forced: Collection[Operation]
) -> tuple[list[_Step], dict[int, int]]:
    """The steps that are needed, and which storage's last version is which: version → storage."""
    number = count()
    current: dict[int, int] = {}
    steps = []
    for operation in operations:
        current |= {storage: next(number) for storage in operation.writes if storage not in current}
        current |= {storage: next(number) for storage in (*operation.overwrites, *operation.creates)}
        touched = {*operation.reads, *operation.writes, *operation.overwrites, *operation.creates}
        steps.append(_Step(operation, {storage: current[storage] for storage in sorted(touched)}))
    finals = {current[storage]: storage for storage in wanted}
    live, kept, must = set(finals), [], set(forced)
    for step in reversed(steps):
        operation, versions = step.operation, step.versions
        changed = {versions[storage] for storage in (*operation.writes, *operation.overwrites, *operation.creates)}
        if operation not in must and live.isdisjoint(changed):
            continue
        for storage in operation.writes.keys() - operation.reads:
            if versions[storage] not in live:
                versions[storage] = next(number)  # nobody will look: it draws into memory of its own
        live |= {versions[storage] for storage in operation.reads}
        kept.append(step)
    return kept[::-1], finals


def _link(steps: Sequence[_Step]) -> None:
    """Who waits for whom: reading for the write before it, writing for all that came before it, in the same version."""
    writer: dict[int, _Step] = {}
    readers: defaultdict[int, list[_Step]] = defaultdict(list)
    for step in steps:
        before: dict[_Step, None] = {}  # in order of time
        for storage, version in step.versions.items():
            if version in writer:
                before[writer[version]] = None
            if storage in step.operation.writes:
                before |= dict.fromkeys(readers.pop(version, ()))
                writer[version] = step
            elif storage in step.operation.reads:
                readers[version].append(step)
            else:
                writer[version] = step
        for earlier in before:
            earlier.followers.append(step)
        step.waits_for = len(before)


def _carry_out(step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
    operation, versions = step.operation, step.versions
    for storage, size in (operation.writes | operation.overwrites).items():
        if versions[storage] not in storages:
            storages[versions[storage]] = torch.UntypedStorage(size, device="cpu")

    def real(value: Any) -> Any:
        return value.tensor(storages[versions[value.storage]]) if isinstance(value, Place) else value

    arguments = each(operation.arguments, real)
    keywords = {name: each(value, real) for name, value in operation.keywords.items()}
    results = list(tensors(_call(operation, arguments, keywords)))
    for place, result in zip(operation.results, results, strict=True):
        if place is not None:
            if operation.empty and not (torch.are_deterministic_algorithms_enabled() and _filling()):
                result.zero_()  # what nobody initialises should be the same on all ranks
            storages[versions[place.storage]] = _laid_out(place, operation.creates[place.storage], result)
    step.done = True


def _call(operation: Operation, arguments: Any, keywords: dict[str, Any]) -> Any:
    """The function itself, its generator and the default type as they were."""
    if operation.generator is not None and operation.state is not None:
        operation.generator.set_state(operation.state)
        keywords = keywords | {"generator": operation.generator}
    elif operation.draws and operation.state is not None:
        torch.default_generator.set_state(operation.state)
    usual = torch.get_default_dtype()
    if operation.float_type is usual:
        return operation.function(*arguments, **keywords)
    torch.set_default_dtype(operation.float_type)
    try:
        return operation.function(*arguments, **keywords)
    finally:
        torch.set_default_dtype(usual)


def _filling() -> bool:
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def _laid_out(place: Place, size: int, result: Tensor) -> torch.UntypedStorage:
    """The storage of a result, laid out as the record expects it; kernels of other devices may choose other strides."""
    storage = result.untyped_storage()
    layout = (result.storage_offset(), tuple(result.shape), result.stride())
    if storage.nbytes() == size and layout == (place.offset, place.size, place.stride):
        return storage
    storage = torch.UntypedStorage(size, device="cpu")
    place.tensor(storage).copy_(result)
    return storage
