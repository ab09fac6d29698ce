"""The order of an epoch's samples, the same for any number of ranks, and which of them one rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainer.data.data import Data
from trainer.data.rng import GOLDEN, mix_bits, mix_seeds, to_int64
from trainer.messages import Refusal

_MOST_PERMUTED = 10**8  # samples: of more a permutation takes gigabytes and minutes, on every rank and in every epoch
_ORDER_SEED = 0x6F72646572  # so that the numbers of the order are others than those of augmenting, dropout, …


class EpochOrder:
    """The global indices of an epoch, which depend on (seed, epoch) alone: what the data says, or a permutation."""

    def __init__(self, data: Data, dataset: Any, seed: int) -> None:
        """Refusal where the data set cannot be indexed, or the order is no list of its indices."""
        self._data, self._seed = data, seed
        self._size = dataset_size(dataset)
        # N of an epoch; every epoch has as many
        default = type(data).order is Data.order
        self.length = self._size if default else len(make_epoch_order(data, self._size, seed, 0))

    def __call__(self, epoch: int) -> Tensor | HugeOrder:
        """The indices of one epoch, in order."""
        indices = make_epoch_order(self._data, self._size, self._seed, epoch)
        if len(indices) != self.length:
            raise ValueError(
                f"order({epoch}) has {len(indices)} indices, order(0) has {self.length}; epochs must be alike"
            )
        return indices


def make_epoch_order(data: Data, size: int, seed: int, epoch: int) -> Tensor | HugeOrder:
    """The order of one epoch: what the data says of its `size` samples, or a permutation. Refusal for no such list."""
    seed = mix_seeds(seed, _ORDER_SEED, epoch)
    # the default of Data.order would make the training set again to ask for its length
    if type(data).order is Data.order:
        return HugeOrder(size, seed) if size > _MOST_PERMUTED else _permutation(size, seed)
    generator = torch.Generator().manual_seed(seed)
    # what a lab returns may be a list, or lie on a device; it must hold indices of the set: (N,) int64
    indices = torch.as_tensor(data.order(epoch, generator), dtype=torch.int64, device="cpu")
    if indices.dim() != 1 or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size):
        raise Refusal(
            f"{type(data).__name__}.order({epoch}) must be a list of indices in 0..{size - 1}, got"
            f" shape {tuple(indices.shape)}"
            + (f" with {int(indices.min())}..{int(indices.max())}" if len(indices) else "")
        )
    return indices


@lru_cache(maxsize=1)  # of 10⁸ samples it takes seconds, and several ask for it at a start
def _permutation(size: int, seed: int) -> Tensor:
    """(size,) of 32 bits where they are enough: the same numbers, in half of the memory."""
    dtype = torch.int32 if size < 2**31 else torch.int64
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dataclass(frozen=True)
class HugeOrder:
    """A permutation of so many numbers that a slice computes, without all the others: a cipher of the places.

    Four rounds of a Feistel network over the next power of four; what falls beyond the size is enciphered again until
    it does not (cycle walking; Black and Rogaway 2002).
    """

    size: int
    seed: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice) -> Tensor:
        """(n,): the indices of these places."""
        numbers = self._encipher(torch.arange(*places.indices(self.size)))
        while (beyond := (numbers >= self.size).nonzero().flatten()).numel():
            numbers[beyond] = self._encipher(numbers[beyond])
        return numbers

    def _encipher(self, numbers: Tensor) -> Tensor:
        half = ((self.size - 1).bit_length() + 1) // 2  # bits
        mask = 2**half - 1
        left, right = numbers >> half, numbers & mask
        for turn in range(4):
            left, right = right, left ^ (mix_bits(right * to_int64(GOLDEN) + mix_seeds(self.seed, turn)) & mask)
        return (left << half) | right


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
    """Which samples this rank reads, and on which device they are needed.

    Step k has the samples `order[k·B : (k+1)·B]` on any number of ranks, and a rank takes `batch[rank :: ranks]` of
    them. If the number of ranks does not divide B, the first ranks have one sample more than the others.
    """

    rank: int  # among the ranks that read different samples
    ranks: int  # how many these are
    device: torch.device
    seed: int  # of order and augmentation
    same_shape: bool = False  # must the micro-batches of a step have one shape?

    def steps(self, order: Tensor, global_batch: int, positions: Tensor | None = None) -> RankSteps:
        """This rank's indices of each whole global batch of an order (N,); what is left at its end nobody reads.

        positions: those in a global batch that are wanted, instead of this rank's.
        """
        whole = len(order) // global_batch * global_batch
        # (steps, B) → every ranks-th column from this rank's on → steps × (B / ranks,)
        columns = slice(self.rank, None, self.ranks) if positions is None else positions
        return RankSteps(order[:whole].view(-1, global_batch)[:, columns])

    def find_partners(self, global_batch: int) -> tuple[Tensor, Tensor]:
        """The positions in a global batch that mixing needs on this rank, and which of them are the partners.

        First this rank's samples, then those partners that other ranks have. The partner of a sample is half a batch
        later; after the end comes the beginning. If all ranks have the same, even number of samples, a rank has all
        partners itself. Shapes: (needed,) positions, (B / ranks,) indices into them.
        """
        local = torch.arange(self.rank, global_batch, self.ranks)
        partners = (local + global_batch // 2) % global_batch
        needed = torch.cat((local, partners[partners % self.ranks != self.rank]))
        # position in the global batch → row among those needed
        row = torch.empty(global_batch, dtype=torch.int64)
        row[needed] = torch.arange(len(needed))
        return needed, row[partners]

    def rows(self, span: range) -> range:
        """Which rows of this rank's batch lie in a span of the global batch: row j is its sample j · ranks + rank."""
        # samples of this rank before a position: those at rank, rank + ranks, … below it, so a division rounded up
        start, stop = (-(-(at - self.rank) // self.ranks) for at in (span.start, span.stop))
        return range(start, stop)


@dataclass(frozen=True)
class RankSteps:
    """This rank's indices of each step, one step after the other, as often as they are asked for.

    Not a list: as tensors of their own the rows would need more memory than the table.
    """

    rows: Tensor  # (steps, samples)

    def __iter__(self) -> Iterator[Tensor]:
        """Row after row, of int64. Some thousands are made at once, because one at a time costs more."""
        for part in self.rows.split(4096):
            yield from part.long().unbind()


def split_evenly(total: int, count: int) -> list[range]:
    """Cut samples 0 to `total` into so many spans that differ by at most one sample, larger ones first."""
    size, larger = divmod(total, count)
    starts = [at * size + min(at, larger) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
