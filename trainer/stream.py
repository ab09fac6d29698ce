"""Epochs of global batches: this rank's share of each, augmented, on the device, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.data import Data
from trainer.order import Order, size_of
from trainer.reader import Loading, make_reader
from trainer.splitmix import GOLDEN, mixed, signed
from trainer.strategies.base import Strategy
from trainer.transforms import Random
from trainer.tree import moved, rows


@dataclass(frozen=True)
class Batch:
    """Samples on the device, and which ones they are."""

    inputs: Any
    targets: Any
    indices: Tensor  # (B,) of the data set, on the CPU


class Stream:
    """The training data, as every rank sees its own share of the same global batches."""

    def __init__(
        self, data: Data, dataset: Any, strategy: Strategy, global_batch: int, micro_batches: int, loading: Loading
    ) -> None:
        seed = strategy.machine.seed
        order = Order(data, dataset, seed)
        self.global_batch = global_batch
        self.steps_per_epoch = order.length // global_batch
        self.length = order.length  # of an epoch's order
        self._micro_batches = micro_batches
        self._share = global_batch // strategy.data_size
        self._sampler = strategy.sampler(order)
        self._device = strategy.device
        self._data, self._seed = data, seed
        self._reader = make_reader(dataset, data.collate, seed, loading, pin=self._device.type == "cuda")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The steps of one epoch, each a list of micro-batches; `start`: samples of its order that are done already."""
        self._sampler.set_epoch(epoch, start)
        steps = max(self.length - start, 0) // self.global_batch
        share = self._sampler.share()[: steps * self._share]
        lists = share.split(self._share) if steps else ()
        for indices, (inputs, targets) in zip(lists, self._reader.read(epoch, lists), strict=True):
            batch = prepare(self._data, inputs, targets, indices, self._device, self._seed, epoch, training=True)
            size = self._share // self._micro_batches
            yield [cut(batch, at, at + size) for at in range(0, self._share, size)]

    def example(self) -> tuple[Any, Any]:
        """Two samples of this rank's, as (inputs, targets) on the device: enough to see what a step touches."""
        indices = self._sampler.share()[:2]
        inputs, targets = next(iter(self._reader.read(0, [indices])))
        batch = prepare(self._data, inputs, targets, indices, self._device, self._seed, 0, training=True)
        return batch.inputs, batch.targets


class EvaluationStream:
    """The evaluation data in file order: every sample once, whatever the number of ranks."""

    def __init__(self, data: Data, dataset: Any, strategy: Strategy, global_batch: int, loading: Loading) -> None:
        self.size = size_of(dataset)
        self._global_batch, self._ranks, self._rank = global_batch, strategy.data_size, strategy.data_rank
        self._device, self._data, self._seed = strategy.device, data, strategy.machine.seed
        self._reader = make_reader(dataset, data.collate, self._seed, loading, pin=self._device.type == "cuda")

    def batches(self, most: int | None = None) -> Iterator[tuple[Batch, int]]:
        """Batches and how many of their samples count; as many batches on every rank. `most`: stop after so many."""
        lists, valid = [], []
        for at in range(0, self.size, self._global_batch)[:most]:
            together = torch.arange(at, min(at + self._global_batch, self.size))
            own = together[self._rank :: self._ranks]
            width = -(-len(together) // self._ranks)  # the longest share; shorter ones repeat a sample to be as long
            filler = (own if len(own) else together)[-1:].repeat(width - len(own))
            lists.append(torch.cat([own, filler]))
            valid.append(len(own))
        for indices, count, (inputs, targets) in zip(lists, valid, self._reader.read(0, lists), strict=True):
            yield prepare(self._data, inputs, targets, indices, self._device, self._seed, 0, training=False), count


def prepare(
    data: Data, inputs: Any, targets: Any, indices: Tensor, device: torch.device, seed: int, epoch: int, training: bool
) -> Batch:
    """Bring samples to the device and augment them there, the whole batch at once."""
    inputs, targets = moved(inputs, device), moved(targets, device)
    random = Random(seed, epoch, indices.to(device, non_blocking=True))
    inputs, targets = data.augment(inputs, targets, random, training)
    return Batch(inputs, targets, indices)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch; the batch itself where that is all of it."""
    size = len(batch.indices)
    if start == 0 and stop == size:
        return batch
    inputs, targets = (rows(tree, start, stop, size) for tree in (batch.inputs, batch.targets))
    return Batch(inputs, targets, batch.indices[start:stop])


def digest(indices: Tensor) -> Tensor:
    """The sum of hashes of whole numbers, modulo 2⁶⁴: the same for every order, another one if a number stands twice.

    indices: int64, on the CPU; result: 0-d int64, whose 64 bits add up over ranks and wrap.
    """
    return mixed((indices + 1) * signed(GOLDEN)).sum()  # 0 would hash to 0 and could come as often as it liked
