"""What a rank reads of each global batch: its share, augmented on the device, and mixed with its partners if asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from trainer.data.data import Data
from trainer.data.draws import Random
from trainer.data.reader import Loading, reading
from trainer.data.seeds import mix
from trainer.data.slice import Slice
from trainer.data.tree import moved, picked, rows
from trainer.devices import pins

_MIXING = 0x6D6978  # sets the numbers of mixing apart from those of augmenting

Share = tuple[Tensor, Any, Any]  # indices on the CPU; inputs and targets on the device


class Samples:
    """Reads lists of indices: samples on the device, augmented there."""

    def __init__(self, data: Data, dataset: Any, own: Slice, loading: Loading) -> None:
        self._data, self._device, self._seed = data, own.device, own.seed
        self._read = reading(dataset, data.collate, own.seed, loading, pin=pins(own.device))

    def read(self, epoch: int, lists: Iterable[Tensor], training: bool) -> Iterator[Share]:
        """(indices, inputs, targets) of each list, in order; the indices stay on the CPU. The lists are read twice."""
        for indices, (inputs, targets) in zip(lists, self._read(epoch, lists), strict=True):
            inputs, targets, there = moved((inputs, targets, indices), self._device)
            # All samples of the rank at once: a kernel for each micro-batch would cost as many launches.
            yield indices, *self._data.augment(inputs, targets, Random(self._seed, epoch, there), training)


class Shares:
    """A rank's share of each global batch of an order."""

    def __init__(self, data: Data, samples: Samples, own: Slice) -> None:
        self._data, self._samples, self._own = data, samples, own

    def read(self, epoch: int, order: Tensor, global_batch: int) -> Iterator[Share]:
        """One share for each whole global batch."""
        return self._samples.read(epoch, self._own.steps(order, global_batch), training=True)


class MixedShares(Shares):
    """The same, each sample mixed with its partner: the one half a global batch further on.

    As a rule this rank holds it too. Where another one does, it is read and augmented here once more. So nothing need
    be sent, and a sample is the same whatever the number of ranks.
    """

    def read(self, epoch: int, order: Tensor, global_batch: int) -> Iterator[Share]:
        """One share for each whole global batch."""
        assert self._data.mix is not None
        needed, partners = self._own.pairs(global_batch)
        size, count = len(needed), len(partners)
        partners = moved(partners, self._own.device)
        lists = self._own.steps(order, global_batch, needed)
        for indices, *both in self._samples.read(epoch, lists, training=True):
            own = indices[:count]
            random = Random(mix(self._own.seed, _MIXING), epoch, moved(own, self._own.device))
            inputs, targets = rows(both, 0, count, size)
            others, other_targets = picked(both, partners, size)
            yield own, *self._data.mix(inputs, targets, others, other_targets, random)


def shares(data: Data, samples: Samples, own: Slice) -> Shares:
    """Shares as they are read, or mixed, where the data mixes."""
    return (Shares if data.mix is None else MixedShares)(data, samples, own)
