"""The worst answers of an evaluation: which samples they are, what was said, and what is true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.stream import Batch
from trainer.learning.task import Around, Task, innermost
from trainer.parallel.ranks import Ranks

KEPT = 10


class Mistake(NamedTuple):
    """One answer."""

    sample: int  # its number in the set
    error: float  # the larger, the worse
    said: float
    true: float


class Watched(Around):
    """A task of which an evaluation also leaves the worst answers of this rank, on the device: nothing waits for them.

    Only who has outputs is asked for metrics, so it does not matter under which strategy: of ranks that have the same
    samples several may keep the same answers, and some none.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._kept: dict[str, Tensor] = {}  # (KEPT,) each, the worst first

    def through(self, batches: Iterable[tuple[Batch, int]]) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of an evaluation, as they are: which samples the next answers are about."""
        for batch, valid in batches:
            self._indices, self._valid = batch.indices, valid
            yield batch, valid

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        if self._valid and (found := self.inner.mistakes(output, target)):
            self._keep(found)
        return self.inner.metrics(output, target)

    def _keep(self, found: dict[str, Tensor]) -> None:
        """Of the worst so far and these the worst. ValueError where there is not one answer a sample."""
        samples = len(self._indices)
        for name in Mistake._fields[1:]:
            if name not in found or found[name].shape != (samples,):
                said = f"of shape {tuple(found[name].shape)}" if name in found else "missing"
                raise ValueError(f"{type(innermost(self)).__name__}.mistakes: {name} is {said}; expected ({samples},)")
        error = found["error"].detach()
        # the samples of a rank lie equally far apart: they are counted on the device, for a copy would wait for it
        first, last = int(self._indices[0]), int(self._indices[-1])
        apart = (last - first) // max(samples - 1, 1) or 1
        rows = {"sample": torch.arange(first, last + 1, apart, device=error.device), **found}
        rows = {
            name: torch.cat([self._kept[name], rows[name]]) if self._kept else rows[name] for name in Mistake._fields
        }
        # stable: of equal errors the first sample comes first, on any number of ranks
        worst = rows["error"].sort(descending=True, stable=True).indices[:KEPT]
        self._kept = {name: values[worst] for name, values in rows.items()}

    def read(self, ranks: Ranks) -> list[Mistake]:
        """Collective: the worst answers of all ranks, each sample once, the worst first."""
        own = [values.tolist() for values in self._kept.values()]
        # these ranks; four numbers for each of a few samples
        heard = ranks.all_gather_values(list(zip(*own, strict=True)))
        known = {mistake.sample: mistake for rank in heard for mistake in map(Mistake._make, rank)}
        # not a number is worse than any
        return sorted(known.values(), key=lambda one: (-inf if isnan(one.error) else -one.error, one.sample))[:KEPT]
