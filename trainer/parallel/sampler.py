"""One rank's share of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils.data import Sampler


class ShardSampler(Sampler[int]):
    """`order(epoch)[start + rank :: ranks]`: every rank deals itself its samples from one global order.

    Global step k is `order[k·B : (k+1)·B]` for every number of ranks that divides B, so nothing about the order of
    samples depends on how many there are.
    """

    def __init__(self, order: Callable[[int], Tensor], rank: int, ranks: int) -> None:
        self._order, self._rank, self._ranks = order, rank, ranks
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take another epoch's order, from a position of the global order on."""
        self._share = self._order(epoch)[start + self._rank :: self._ranks]

    def share(self) -> Tensor:
        """The indices of this rank, in the order in which it reads them."""
        return self._share

    def __iter__(self) -> Iterator[int]:
        return iter(self._share.tolist())

    def __len__(self) -> int:
        return len(self._share)
