"""Samples that come several times in an epoch: repeated augmentation, and classes drawn as often as others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.data import Data

_MOST = 1 << 20  # appearances of a sample in one epoch that have numbers of their own


class Appearances(Dataset):
    """A set whose sample i appears for the k-th time under the number i + k · N.

    Random numbers belong to (seed, epoch, number), so each appearance is augmented in its own way.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset) * _MOST

    def fingerprint(self) -> str:
        """That of the set itself."""
        return Data().fingerprint(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[number % len(self._dataset)]

    def item(self, number: int, epoch: int) -> Any:
        """The same in an epoch, on which samples may depend."""
        at, item = number % len(self._dataset), getattr(self._dataset, "item", None)
        return item(at, epoch) if callable(item) else self._dataset[at]


class AppearancesInMemory(Appearances):
    """The same of a set that is read in whole batches."""

    def batch(self, numbers: Tensor) -> Any:
        """The samples of these numbers."""
        return self._dataset.batch(numbers % len(self._dataset))


def appearances(dataset: Any) -> Appearances:
    """The set with numbers for each appearance of its samples."""
    return (AppearancesInMemory if hasattr(dataset, "batch") else Appearances)(dataset)


def sampled(labels: Tensor, repeat: int, balance: float, generator: torch.Generator) -> Tensor:
    """The numbers of an epoch's samples, in order: (N,) int64, as many as the set has, for `appearances`.

    labels: (N,) class numbers. repeat: so many appearances of a sample in a row (repeated augmentation, Hoffer et al.
    2020); balance: 1 draws all classes equally often, 0 as they come, between them by their size to that power.
    """
    size = len(labels)
    distinct = -(-size // repeat)
    if balance:
        weights = torch.bincount(labels).double().pow(-balance)[labels]  # (N,): of a rare class's samples larger
        drawn = torch.multinomial(weights, distinct, replacement=True, generator=generator)
    else:
        drawn = torch.randperm(size, generator=generator)[:distinct]
    return numbered(drawn.repeat_interleave(repeat)[:size], size)


def numbered(indices: Tensor, size: int) -> Tensor:
    """Each index as the number of its appearance: i, then i + size, i + 2 · size, …"""
    ordered, at = indices.sort(stable=True)
    # in that order equal ones stand together: how far each is from the first of them
    earlier = torch.arange(len(indices)) - torch.searchsorted(ordered, ordered)
    return indices + size * torch.empty_like(indices).index_copy_(0, at, earlier)
