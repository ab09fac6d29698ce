"""One rank's share of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.data import Sampler


class ShardSampler(Sampler[int]):
    """Every rank deals itself its samples of each global batch from one global order: `batch[rank :: ranks]`.

    Global step k is `order[k·B : (k+1)·B]` for every number of ranks, so nothing about the order of samples depends on
    how many there are. Where they do not divide B, the first ranks have one sample more than the others.
    """

    def __init__(self, order: Callable[[int], Tensor], rank: int, ranks: int) -> None:
        self._order, self._rank, self._ranks = order, rank, ranks
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take another epoch's order, from a position of the global order on."""
        self._left = self._order(epoch)[start:]

    def steps(self, global_batch: int) -> list[Tensor]:
        """This rank's indices of each whole global batch that is left of the epoch."""
        # (steps, B) → every ranks-th column from this rank's on → steps × (B / ranks,); the tail is left out.
        whole = len(self._left) // global_batch * global_batch
        return list(self._left[:whole].view(-1, global_batch)[:, self._rank :: self._ranks].unbind())

    def share(self) -> Tensor:
        """The indices of this rank, where the rest of the epoch is one batch."""
        return self._left[self._rank :: self._ranks]

    def __iter__(self) -> Iterator[int]:
        return iter(self.share().tolist())

    def __len__(self) -> int:
        return len(self.share())


@dataclass(frozen=True)
class Slice:
    """Which samples are this rank's, and where they go."""

    rank: int  # among those that read different samples
    ranks: int  # that read different samples
    device: torch.device
    seed: int  # of order and augmentation

    def sampler(self, order: Callable[[int], Tensor]) -> ShardSampler:
        """This rank's share of every epoch's order."""
        return ShardSampler(order, self.rank, self.ranks)

    def rows(self, span: range) -> range:
        """Which rows of this rank's share lie in a span of the global batch: row j is sample j · ranks + rank of it."""
        # Samples of this rank before a position: those at rank, rank + ranks, … below it, so a division rounded up.
        start, stop = (max(-(-(at - self.rank) // self.ranks), 0) for at in (span.start, span.stop))
        return range(start, stop)


def spans(total: int, count: int) -> list[range]:
    """Cut samples 0 to `total` into so many spans that differ by at most one sample, larger ones first."""
    size, larger = divmod(total, count)
    starts = [at * size + min(at, larger) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
