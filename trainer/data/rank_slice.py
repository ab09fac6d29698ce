"""One rank's share of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Which samples are this rank's, and where they go.

    Every rank deals itself its samples of each global batch from one global order: `batch[rank :: ranks]`. Global step
    k is `order[k·B : (k+1)·B]` for every number of ranks, so nothing about the order of samples depends on how many
    there are. Where they do not divide B, the first ranks have one sample more than the others.
    """

    rank: int  # among those that read different samples
    ranks: int  # that read different samples
    device: torch.device
    seed: int  # of order and augmentation
    alike: bool = False  # must the micro-batches of a step have one shape?

    def steps(self, order: Tensor, global_batch: int, at: Tensor | None = None) -> Steps:
        """This rank's indices of each whole global batch of an order; what is left at its end is nobody's.

        at: positions in a global batch, instead of this rank's.
        """
        whole = len(order) // global_batch * global_batch
        # (steps, B) → every ranks-th column from this rank's on → steps × (B / ranks,)
        columns = slice(self.rank, None, self.ranks) if at is None else at
        return Steps(order[:whole].view(-1, global_batch)[:, columns])

    def pairs(self, global_batch: int) -> tuple[Tensor, Tensor]:
        """Where in a global batch this rank's samples are, then those of their partners that are other ranks'.

        And which of all these is the partner of each of this rank's samples: the one half a batch further on, from the
        end on at the beginning. It is this rank's own where all ranks have as many samples, an even number.
        """
        own = torch.arange(self.rank, global_batch, self.ranks)
        partners = (own + global_batch // 2) % global_batch
        needed = torch.cat((own, partners[partners % self.ranks != self.rank]))
        # position → place among those needed
        place = torch.empty(global_batch, dtype=torch.int64)
        place[needed] = torch.arange(len(needed))
        return needed, place[partners]

    def rows(self, span: range) -> range:
        """Which rows of this rank's share lie in a span of the global batch: row j is sample j · ranks + rank of it."""
        # samples of this rank before a position: those at rank, rank + ranks, … below it, so a division rounded up
        start, stop = (-(-(at - self.rank) // self.ranks) for at in (span.start, span.stop))
        return range(start, stop)


@dataclass(frozen=True)
class Steps:
    """The rows of a table (steps, samples), one by one, as often as they are asked for.

    Not a list of them: as tensors of their own they would need more memory than what they are rows of.
    """

    rows: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Row after row; some thousands are made at once, as one at a time costs more."""
        for part in self.rows.split(4096):
            yield from part.unbind()


def spans(total: int, count: int) -> list[range]:
    """Cut samples 0 to `total` into so many spans that differ by at most one sample, larger ones first."""
    size, larger = divmod(total, count)
    starts = [at * size + min(at, larger) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
