"""One rank's share of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
        whole = len(self._left) // global_batch * global_batch
        return list(self._left[:whole].view(-1, global_batch)[:, self._rank :: self._ranks].unbind())

    def share(self) -> Tensor:
        """The indices of this rank, where the rest of the epoch is one batch."""
        return self._left[self._rank :: self._ranks]

    def __iter__(self) -> Iterator[int]:
        return iter(self.share().tolist())

    def __len__(self) -> int:
        return len(self.share())


def rows_of(part: range, rank: int, ranks: int) -> range:
    """Which rows of a rank's share lie in a part of the global batch: row j is the batch's sample j · ranks + rank."""
    start, stop = (max(-(-(at - rank) // ranks), 0) for at in (part.start, part.stop))
    return range(start, stop)
