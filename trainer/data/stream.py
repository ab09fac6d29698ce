"""Epochs of global batches: this rank's share of each, in micro-batches, augmented, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.rank_batches import IndexedBatch, SampleReader, make_micro_batching, make_rank_batches
from trainer.data.reader import LoaderOptions
from trainer.data.sample_order import EpochOrder, RankSampler, dataset_size, split_evenly
from trainer.data.seeds import GOLDEN, mix_bits, to_int64

_HERE = LoaderOptions(workers=0)  # in this process


class Batch(NamedTuple):
    """Samples on the device, and which ones they are."""

    inputs: Any
    targets: Any
    indices: Tensor  # (B,) of the data set, on the CPU
    span: range  # samples of the global batch that all data ranks have of this micro-batch, dealt to them in turn
    total: int  # samples of the global batch
    continues: bool = False  # is there a batch before it in its epoch or evaluation, whose rows it may go on from?


class TrainLoader:
    """The training batches of this rank: its share of global batches that are the same on any number of ranks."""

    def __init__(
        self,
        data: Data,
        dataset: Any,
        own: RankSampler,
        global_batch: int,
        micro_batches: int = 1,
        loading: LoaderOptions = _HERE,
    ) -> None:
        self._own, self._order = own, EpochOrder(data, dataset, own.seed)
        self._shares = make_rank_batches(data, dataset, own, loading)
        self.length = self._order.length  # of an epoch
        self.global_batch = global_batch
        self.steps_per_epoch = self.length // global_batch
        # cut into micro-batches first and dealt then, the samples of one are the same whatever the number of ranks
        self._spans = split_evenly(global_batch, micro_batches)
        self._parts = [own.rows(span) for span in self._spans]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The steps of one epoch, each a list of micro-batches; `start`: samples of its order that are done already."""
        order = self._order(epoch)[start:]
        read = self._shares.read(epoch, order, self.global_batch, self._parts)
        for done, step in enumerate(read):
            yield [
                Batch(inputs, targets, indices, span, self.global_batch, start + done > 0)
                for (indices, inputs, targets), span in zip(step, self._spans, strict=True)
            ]

    def example(self) -> tuple[Any, Any]:
        """Two samples of this rank's, as (inputs, targets) on the device: enough to see what a step touches.

        One, where some rank has no more: as many on every rank.
        """
        least = self.length // self._own.ranks  # samples of an epoch that every rank has
        rows = min(2, least)
        batch = self._own.ranks * rows
        ((_, inputs, targets),) = next(self._shares.read(0, self._order(0)[:batch], batch, [range(rows)]))
        return inputs, targets


class EvalLoader:
    """The evaluation data in file order: every sample once, whatever the number of ranks."""

    def __init__(
        self, data: Data, dataset: Any, own: RankSampler, global_batch: int, micro_batches: int, loading: LoaderOptions
    ) -> None:
        self.size = dataset_size(dataset)
        self._own, self._global_batch = own, global_batch
        self.most = -(-global_batch // micro_batches)  # samples of all data ranks in one forward
        self._samples = SampleReader(data, dataset, own, loading)
        self._cutting = make_micro_batching(data, dataset, own, self._samples)

    def example(self) -> tuple[Any, Any]:
        """A sample or two, as (inputs, targets) on the device, as many on every rank: enough to see a step."""
        least = max(1, min(2, min(self.size, self.most) // self._own.ranks))  # samples that every rank has of a batch
        own = range(self.size)[self._own.rank :: self._own.ranks][:least] or range(self.size)[-1:]
        return self.some(torch.tensor(own))

    def first(self) -> Batch:
        """A micro-batch of one sample of each rank; a rank without one takes the last of the set."""
        index = min(self._own.rank, self.size - 1)
        inputs, targets = self.some(torch.tensor([index]))
        span = range(min(self._own.ranks, self.size))
        return Batch(inputs, targets, torch.tensor([index]), span, len(span))

    def some(self, indices: Tensor) -> tuple[Any, Any]:
        """These samples, as (inputs, targets) on the device, for one rank alone."""
        ((_, inputs, targets),) = self._samples.read(0, [indices], training=False)
        return inputs, targets

    def batches(self, at: Sequence[int] | None = None) -> Iterator[tuple[Batch, int]]:
        """Micro-batches of each batch, and how many of their samples count; as many of them on every rank.

        at: the numbers of some batches, in order; None: all.
        """
        samples, size = range(self.size), self._global_batch
        wholes = [samples[number * size : (number + 1) * size] for number in (range(len(self)) if at is None else at)]
        for whole, step in zip(wholes, self._cutting.read(0, map(self._cut, wholes), training=False), strict=True):
            spans = self._spans(len(whole))
            for (indices, inputs, targets), span in zip(step, spans, strict=True):
                batch = Batch(inputs, targets, indices, span, len(whole), whole.start > 0)
                yield batch, len(self._own.rows(span))

    def __len__(self) -> int:
        """How many batches there are."""
        return -(-self.size // self._global_batch)

    def _cut(self, whole: range) -> IndexedBatch:
        """This rank's samples of a batch, and its rows of each micro-batch.

        A rank without a sample takes one that does not count, for it must compute with the others.
        """
        own = whole[self._own.rank :: self._own.ranks] or whole[-1:]
        parts = [self._own.rows(span) or range(1) for span in self._spans(len(whole))]
        return torch.arange(own.start, own.stop, own.step), parts

    def _spans(self, total: int) -> list[range]:
        """The micro-batches of a batch, over all ranks.

        Cut first and dealt then, as in training: a micro-batch holds the same whatever the number of ranks.
        """
        return [range(total)[start : start + self.most] for start in range(0, total, self.most)]


def digest_indices(indices: Tensor) -> Tensor:
    """The sum of hashes of whole numbers, modulo 2⁶⁴: the same for every order, another one if a number stands twice.

    indices: int64, on the CPU; result: 0-d int64, whose 64 bits add up over ranks and wrap.
    """
    return mix_bits((indices + 1) * to_int64(GOLDEN)).sum()  # 0 would hash to 0 and could come as often as it liked
