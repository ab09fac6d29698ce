"""The global order of an epoch's samples, the same for every number of ranks, and one rank's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainer.data.data import Data
from trainer.data.rng import mix_seeds
from trainer.messages import Refusal

_ORDER = 0x6F72646572  # sets the order's stream of random numbers apart from all others of the same seed


class EpochOrder:
    """`order(epoch)`: global indices that depend on (seed, epoch) alone: what the data says, or a permutation."""

    def __init__(self, data: Data, dataset: Any, seed: int) -> None:
        """Refusal where the data set cannot be indexed, or the order is no list of its indices."""
        self._data, self._seed = data, seed
        self._size = dataset_size(dataset)
        self.length = len(make_epoch_order(data, self._size, seed, 0))  # N of an epoch; every epoch has as many

    def __call__(self, epoch: int) -> Tensor:
        """The indices of one epoch, in order."""
        indices = make_epoch_order(self._data, self._size, self._seed, epoch)
        if len(indices) != self.length:
            raise ValueError(
                f"order({epoch}) has {len(indices)} indices, order(0) has {self.length}; epochs must be alike"
            )
        return indices


def make_epoch_order(data: Data, size: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch: what the data says of its `size` samples, or a permutation. Refusal for no such list."""
    generator = torch.Generator().manual_seed(mix_seeds(seed, _ORDER, epoch))
    # The default of Data.order would make the training set again to ask for its length.
    if type(data).order is Data.order:
        return torch.randperm(size, generator=generator)
    # What a lab gives may be a list or lie on a device; it must hold indices of the set: (N,) int64.
    indices = torch.as_tensor(data.order(epoch, generator), dtype=torch.int64, device="cpu")
    if indices.dim() != 1 or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size):
        raise Refusal(
            f"{type(data).__name__}.order({epoch}) must be a list of indices in 0..{size - 1}, got"
            f" shape {tuple(indices.shape)}"
            + (f" with {int(indices.min())}..{int(indices.max())}" if len(indices) else "")
        )
    return indices


def dataset_size(dataset: Any) -> int:
    """How many samples a map-style data set has. Refusal for one that is only iterable."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise Refusal(f"{name} is iterable only: it needs len() and [i], so that order and resume can be exact")
    if not hasattr(dataset, "__len__"):
        raise Refusal(f"{name} has no len(), so the length of an epoch is unknown")
    return len(dataset)


@dataclass(frozen=True)
class RankSampler:
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

    def steps(self, order: Tensor, global_batch: int, at: Tensor | None = None) -> RankSteps:
        """This rank's indices of each whole global batch of an order; what is left at its end is nobody's.

        at: positions in a global batch, instead of this rank's.
        """
        whole = len(order) // global_batch * global_batch
        # (steps, B) → every ranks-th column from this rank's on → steps × (B / ranks,)
        columns = slice(self.rank, None, self.ranks) if at is None else at
        return RankSteps(order[:whole].view(-1, global_batch)[:, columns])

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
class RankSteps:
    """The rows of a table (steps, samples), one by one, as often as they are asked for.

    Not a list of them: as tensors of their own they would need more memory than what they are rows of.
    """

    rows: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Row after row; some thousands are made at once, as one at a time costs more."""
        for part in self.rows.split(4096):
            yield from part.unbind()


def split_evenly(total: int, count: int) -> list[range]:
    """Cut samples 0 to `total` into so many spans that differ by at most one sample, larger ones first."""
    size, larger = divmod(total, count)
    starts = [at * size + min(at, larger) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
