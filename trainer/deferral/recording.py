"""What a constructor did, as operations: the storages it made, the random numbers it drew, and values where it asks."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.deferral.replay import Operation, Place, replay
from trainer.seeds import mix

_MARK = 0x6D61726B  # any number; apart from other uses of `mix`


class NotDeferrable(Exception):
    """A network cannot be built without its values; the text says why."""


class Recorder:
    """The record of a construction, in order of time."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.draws = Draws()
        self.busy = False  # the recorder itself computes: nothing is recorded
        self.inside = False  # within a call of torch that names no device: "meta" is then our stand-in for the CPU
        self.refused: NotDeferrable | None = None
        self._numbers: dict[torch.UntypedStorage, int] = {}
        self._changed_by: defaultdict[int, list[int]] = defaultdict(list)  # storage → indices of operations

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Record nothing: the recorder computes."""
        before, self.busy = self.busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.busy = before

    @contextmanager
    def calling(self, names_meta: bool) -> Iterator[None]:
        """A call of torch from Python, which may name the meta device itself."""
        before, self.inside = self.inside, not names_meta
        try:
            yield
        finally:
            self.inside = before

    def refusal(self, reason: str) -> NotDeferrable:
        """The error to raise; it is remembered, in case the constructor swallows it."""
        self.refused = self.refused or NotDeferrable(reason)
        return self.refused

    # Tensors.

    def knows(self, tensor: Tensor) -> bool:
        """Is this a tensor of the record: on the meta device, with a value to come?"""
        return tensor.layout is torch.strided and tensor.untyped_storage() in self._numbers

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor lies; a storage that is new gets a number."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
            raise self.refusal(f"it makes a tensor that is not a plain array ({tensor.layout}, {tensor.dtype})")
        number = self._numbers.setdefault(tensor.untyped_storage(), len(self._numbers))
        return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def add(self, operation: Operation, generator: torch.Generator | None = None) -> None:
        """Take down an operation that has just been called; `generator`: one that it draws from, if not torch's own."""
        index = len(self.operations)
        self.operations.append(operation)
        for storage in (*operation.writes, *operation.overwrites, *operation.creates):
            self._changed_by[storage].append(index)
        if generator is not None:
            operation.generator = torch.Generator()
            operation.state = self.draws.resolved(generator.get_state(), self)
            # drawn for real as well: the constructor may look at its generator, set it, draw by other means
            self.compute(set(), {index}, {})
            generator.set_state(operation.generator.get_state())
        elif operation.draws:
            self.draws.add(index, self)

    def adopt(self, value: Tensor) -> Tensor:
        """Take a real tensor into the record, as a constant; returns what stands for it."""
        twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        place = self.place(twin)
        creates = {place.storage: twin.untyped_storage().nbytes()}
        clone = torch.ops.aten.clone.default
        self.add(Operation(clone, (value.detach(),), {}, set(), creates=creates, results=[place]))
        return twin

    # Values.

    def value(self, tensor: Tensor) -> Tensor:
        """What a tensor of the record holds at this point of the construction, on the CPU."""
        with self.at_work():
            place = self.place(tensor)
            found: dict[int, torch.UntypedStorage] = {}
            self.compute({place.storage}, set(), found)
            return place.tensor(found[place.storage])

    def compute(self, wanted: set[int], forced: set[int], found: dict[int, torch.UntypedStorage]) -> None:
        """Compute storages, and operations by their indices; torch's own generator stays as it is."""
        behind, waiting = self._behind(wanted, forced), self.draws.waiting
        if waiting and any(index >= waiting[0] and self.operations[index].draws for index in behind):
            forced = forced.union(waiting)  # random numbers are drawn early only where a value depends on them
            behind = self._behind(wanted, forced)
        operations = [self.operations[index] for index in sorted(behind)]
        outside = torch.default_generator.get_state()
        try:
            replay(operations, wanted, found.__setitem__, {self.operations[i] for i in forced}, self._drawn)
        finally:
            torch.default_generator.set_state(outside)

    def _drawn(self, operation: Operation) -> None:
        self.draws.note(operation, self.operations)

    def _behind(self, storages: set[int], operations: set[int]) -> set[int]:
        """Indices of these operations, and of all that they or these storages may depend on."""
        indices = set(operations)
        seen = storages.union(*(self.operations[index].reads for index in operations))
        left = list(seen)
        while left:
            for index in self._changed_by[left.pop()]:
                if index not in indices:
                    indices.add(index)
                    more = self.operations[index].reads - seen
                    seen |= more
                    left += more
        return indices


class Draws:
    """The draws from torch's default generator. While a constructor runs it is not used, but carries marks.

    A mark is a state that says how many draws came before. Where another state is found, the constructor has seeded the
    generator; where an older mark is found, it has gone back (`torch.random.fork_rng`).
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []  # indices of draws not computed yet: what numbers come after them is not known
        self._count = 0
        self._after: list[Tensor] = [torch.default_generator.get_state()]  # states: at first, after each computed draw
        self._marks: dict[bytes, int] = {}
        self._set_mark()

    def add(self, index: int, recorder: Recorder) -> None:
        """The constructor draws, with the operation of this index."""
        state = torch.default_generator.get_state()
        if not self.waiting or self._marks.get(_key(state)) != self._count:
            recorder.operations[index].state = self.resolved(state, recorder)
        self.waiting.append(index)
        self._count += 1
        self._set_mark()

    def resolved(self, state: Tensor, recorder: Recorder) -> Tensor:
        """The state that this one stands for, which may be a mark."""
        before = self._marks.get(_key(state))
        if before is None:
            return state
        if before >= len(self._after):
            recorder.compute(set(), set(self.waiting), {})
        return self._after[before]

    def note(self, operation: Operation, operations: list[Operation]) -> None:
        """A draw has been computed, and the generator is as it leaves it."""
        if not self.waiting or operation is not operations[self.waiting[0]]:
            return  # not for the first time
        self._after.append(torch.default_generator.get_state())
        del self.waiting[0]
        if self.waiting and operations[self.waiting[0]].state is None:
            operations[self.waiting[0]].state = self._after[-1]

    def _set_mark(self) -> None:
        torch.default_generator.manual_seed(mix(_MARK, self._count))
        self._marks[_key(torch.default_generator.get_state())] = self._count


def _key(state: Tensor) -> bytes:
    return hashlib.sha256(state.numpy().tobytes()).digest()  # 32 bytes of 5056
