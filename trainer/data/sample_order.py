"""The global order of an epoch's samples, the same on every rank and for every number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainer.data.data import Data
from trainer.data.seeds import mix
from trainer.refusal import Refusal

_ORDER = 0x6F72646572  # sets the order's stream of random numbers apart from all others of the same seed


class Order:
    """`order(epoch)`: global indices that depend on (seed, epoch) alone: what the data says, or a permutation."""

    def __init__(self, data: Data, dataset: Any, seed: int) -> None:
        """Refusal where the data set cannot be indexed, or the order is no list of its indices."""
        self._data, self._seed = data, seed
        self._size = size_of(dataset)
        self.length = len(ordered(data, self._size, seed, 0))  # N of an epoch; every epoch has as many

    def __call__(self, epoch: int) -> Tensor:
        """The indices of one epoch, in order."""
        indices = ordered(self._data, self._size, self._seed, epoch)
        if len(indices) != self.length:
            raise ValueError(
                f"order({epoch}) has {len(indices)} indices, order(0) has {self.length}; epochs must be alike"
            )
        return indices


def ordered(data: Data, size: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch: what the data says of its `size` samples, or a permutation. Refusal for no such list."""
    generator = torch.Generator().manual_seed(mix(seed, _ORDER, epoch))
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


def size_of(dataset: Any) -> int:
    """How many samples a map-style data set has. Refusal for one that is only iterable."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise Refusal(f"{name} is iterable only: it needs len() and [i], so that order and resume can be exact")
    if not hasattr(dataset, "__len__"):
        raise Refusal(f"{name} has no len(), so the length of an epoch is unknown")
    return len(dataset)
