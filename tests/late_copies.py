"""Copies between a device and the host on a CPU, as late as a stream may make them: who does not wait reads NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainer.parallel.activation_offload import HostCopies


class LateCopies(HostCopies):
    """A stream whose copies are made when somebody waits for one of them or of those behind it, in order."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0
        self.log: list[str] = []  # what was asked for, with the number of storages
        self.held = 0  # bytes that were sent and not fetched again
        self.most = 0

    @override
    def to_host(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.log.append(f"out {len(values)}")
        self.held += sum(value.nbytes for value in values)
        self.most = max(self.most, self.held)
        return self._later(values)

    @override
    def to_device(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.log.append(f"back {len(copies)}")
        self.held -= sum(copy.nbytes for copy in copies)
        return self._later(copies)

    @override
    def wait(self, event: int) -> None:
        for goal, start in self._queue[self._done : event]:
            goal.data.copy_(start)  # as a device does it: nothing in Python counts it as a write
        self._done = max(self._done, event)

    def _later(self, starts: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        goals = [torch.full_like(start, float("nan") if start.is_floating_point() else -1) for start in starts]
        self._queue += zip(goals, starts, strict=True)
        return goals, len(self._queue)
