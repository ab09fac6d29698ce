"""Epochs of global batches: this rank's share of each, augmented, on the device, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.order import Order, size_of
from trainer.data.reader import Loading
from trainer.data.seeds import GOLDEN, mixed, signed
from trainer.data.shares import Samples, shares
from trainer.data.slice import Slice, spans
from trainer.data.tree import rows

_HERE = Loading(workers=0)  # in this process


class Batch(NamedTuple):
    """Samples on the device, and which ones they are."""

    inputs: Any
    targets: Any
    indices: Tensor  # (B,) of the data set, on the CPU
    span: range  # samples of the global batch that all data ranks have of this micro-batch, dealt to them in turn
    total: int  # samples of the global batch
    continues: bool = False  # is there a batch before it in its epoch or evaluation, whose rows it may go on from?


class Stream:
    """The training data, as every rank sees its own share of the same global batches."""

    def __init__(
        self, data: Data, dataset: Any, own: Slice, global_batch: int, micro_batches: int = 1, loading: Loading = _HERE
    ) -> None:
        self._own, self._order = own, Order(data, dataset, own.seed)
        self._shares = shares(data, Samples(data, dataset, own, loading), own)
        self.length = self._order.length  # of an epoch
        self.global_batch = global_batch
        self.steps_per_epoch = self.length // global_batch
        # cut into micro-batches first and dealt then, the samples of one are the same whatever the number of ranks
        self._cuts = [(own.rows(span), span) for span in spans(global_batch, micro_batches)]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The steps of one epoch, each a list of micro-batches; `start`: samples of its order that are done already."""
        order = self._order(epoch)[start:]
        read = self._shares.read(epoch, order, self.global_batch)
        for done, (indices, inputs, targets) in enumerate(read):  # (B / ranks, …)
            share = Batch(inputs, targets, indices, range(self.global_batch), self.global_batch, start + done > 0)
            yield [micro_batch(share, rows, span) for rows, span in self._cuts]

    def example(self) -> tuple[Any, Any]:
        """Two samples of this rank's, as (inputs, targets) on the device: enough to see what a step touches.

        One, where some rank has no more: as many on every rank.
        """
        least = self.length // self._own.ranks  # samples of an epoch that every rank has
        batch = self._own.ranks * min(2, least)
        _, inputs, targets = next(self._shares.read(0, self._order(0)[:batch], batch))
        return inputs, targets


class EvaluationStream:
    """The evaluation data in file order: every sample once, whatever the number of ranks."""

    def __init__(
        self, data: Data, dataset: Any, own: Slice, global_batch: int, micro_batches: int, loading: Loading
    ) -> None:
        self.size = size_of(dataset)
        self._own, self._global_batch = own, global_batch
        self.most = -(-global_batch // micro_batches)  # samples of all data ranks in one forward
        self._samples = Samples(data, dataset, own, loading)

    def example(self) -> tuple[Any, Any]:
        """A sample or two, as (inputs, targets) on the device, as many on every rank: enough to see a step."""
        batch, _ = next(self.batches(1))
        least = max(1, min(2, min(self.size, self.most) // self._own.ranks))  # samples that every rank has of it
        size = len(batch.indices)
        return rows(batch.inputs, 0, least, size), rows(batch.targets, 0, least, size)

    def some(self, indices: Tensor) -> tuple[Any, Any]:
        """These samples, as (inputs, targets) on the device, for one rank alone."""
        ((_, inputs, targets),) = self._samples.read(0, [indices], training=False)
        return inputs, targets

    def batches(self, most: int | None = None) -> Iterator[tuple[Batch, int]]:
        """Micro-batches of each batch, and how many of their samples count; as many of them on every rank.

        `most`: stop after so many batches.
        """
        samples, rank, ranks = range(self.size), self._own.rank, self._own.ranks
        wholes = [samples[at : at + self._global_batch] for at in samples[:: self._global_batch][:most]]
        # a rank without a sample of a batch takes one that does not count, for it must compute with the others
        owns = [whole[rank::ranks] or whole[-1:] for whole in wholes]
        lists = [torch.arange(own.start, own.stop, own.step) for own in owns]

        cuts = cache(self._cuts)  # all batches but the last are alike
        for whole, (indices, inputs, targets) in zip(wholes, self._samples.read(0, lists, training=False), strict=True):
            share = Batch(inputs, targets, indices, range(len(whole)), len(whole), whole.start > 0)
            for own, span in cuts(len(whole)):
                yield micro_batch(share, own or range(1), span), len(own)

    def _cuts(self, total: int) -> list[tuple[range, range]]:
        """This rank's rows of each micro-batch of a batch, and the whole micro-batch.

        Cut first and dealt then, as in training: a micro-batch holds the same whatever the number of ranks.
        """
        cut = [range(total)[start : start + self.most] for start in range(0, total, self.most)]
        return [(self._own.rows(span), span) for span in cut]


def micro_batch(share: Batch, own: range, span: range) -> Batch:
    """The micro-batch of this span; these rows of the share are this rank's part of it."""
    if span == share.span:
        return share  # a lone micro-batch is all of it
    size = share.indices.shape[0]
    inputs, targets = (rows(tree, own.start, own.stop, size) for tree in (share.inputs, share.targets))
    return Batch(inputs, targets, share.indices[own.start : own.stop], span, share.total, share.continues)


def digest(indices: Tensor) -> Tensor:
    """The sum of hashes of whole numbers, modulo 2⁶⁴: the same for every order, another one if a number stands twice.

    indices: int64, on the CPU; result: 0-d int64, whose 64 bits add up over ranks and wrap.
    """
    return mixed((indices + 1) * signed(GOLDEN)).sum()  # 0 would hash to 0 and could come as often as it liked
