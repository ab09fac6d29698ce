"""Batches of this rank: its samples of each global batch, on the device, augmented, in micro-batches.

`TrainLoader` is for training, `EvalLoader` for an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.micro_batches import (
    DeviceBatch,
    SampleReader,
    choose_micro_batches,
    describe_uncut,
    split_micro_batches,
)
from trainer.data.nested_tensors import has_rows, named_tensors, select_rows, slice_rows, to_device
from trainer.data.rng import GOLDEN, Random, mix_bits, mix_seeds, to_int64
from trainer.data.sampler import EpochOrder, RankSampler, RankSteps, dataset_size, split_evenly
from trainer.messages import Refusal

_SLICE = 2**22  # samples of an order that are dealt at once: it may be computed slice by slice
_LOOKED_AT = 8  # samples, to see whether they are of several sizes
MIX_SEED = 0x6D6978  # so that the numbers of mixing (Data.mix) are others than those of augmenting


class RankBatches:
    """This rank's samples of each global batch, in micro-batches."""

    def __init__(self, data: Data, dataset: Any, sampler: RankSampler, options: LoaderOptions) -> None:
        self._data, self._sampler = data, sampler
        self._reader = SampleReader(data, dataset, sampler, options)
        self._micro_batches = choose_micro_batches(data, dataset, sampler, self._reader)

    def read_lists(self, lists: Sequence[Tensor]) -> Iterator[DeviceBatch]:
        """The batches of these lists of indices, as in the first epoch's training."""
        return self._reader.read(0, lists, training=True)

    def read(
        self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]
    ) -> Iterator[Sequence[DeviceBatch]]:
        """The micro-batches of this rank, for each whole global batch of an order (N,).

        parts: which rows of this rank's batch each micro-batch has.
        """
        steps = self._sampler.steps(order, global_batch)
        if len(parts) == 1:  # a lone micro-batch is all of it
            return zip(self._reader.read(epoch, steps, training=True))
        batches = ((indices, parts) for indices in steps)
        return self._micro_batches.read(epoch, batches, training=True)


class MixedRankBatches(RankBatches):
    """The same, each sample mixed with its partner (`Data.mix`): the sample half a global batch later.

    As a rule this rank has the partner, too. If another rank has it, it is read and augmented here once more. So
    nothing is sent, and a sample is the same on any number of ranks.
    """

    def read(
        self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]
    ) -> Iterator[Sequence[DeviceBatch]]:
        """The micro-batches of this rank, for each whole global batch."""
        assert self._data.mix is not None
        device, seed = self._sampler.device, mix_seeds(self._sampler.seed, MIX_SEED)
        # first this rank's samples, then those partners that are other ranks'
        needed, partners = self._sampler.find_partners(global_batch)
        size, count = len(needed), len(partners)
        partners = to_device(partners, device)  # (count,) rows of what is read
        lists = self._sampler.steps(order, global_batch, needed)
        for indices, *trees in self._reader.read(epoch, lists, training=True):
            _refuse_unmixed((indices, *trees))
            indices = indices[:count]
            inputs, targets = slice_rows(trees, 0, count, size)
            other_inputs, other_targets = select_rows(trees, partners, size)
            random = Random(seed, epoch, to_device(indices, device))
            mixed = self._data.mix(inputs, targets, other_inputs, other_targets, random)
            yield split_micro_batches((indices, *mixed), parts)


def _refuse_unmixed(batch: DeviceBatch) -> None:
    """Refuse to mix what has no partner's rows. Lists of tensors are taken for views of all samples."""
    size = len(batch[0])
    if any(x.shape[:1] != (size,) for tree in batch[1:] for _, x in named_tensors(tree, "")):
        raise Refusal(
            "the data mixes samples with partners, which must be rows of its tensors (B, …), and"
            f" {describe_uncut(batch)}; let collate stack the samples, or do without mix"
        )


_IN_PROCESS = LoaderOptions(workers=0)


class Batch(NamedTuple):
    """A micro-batch of this rank, on the device, and which samples it has."""

    inputs: Any  # (B, …)
    targets: Any
    indices: Tensor  # (B,) of the data set, on the CPU
    span: range  # samples of the global batch that all data ranks have of this micro-batch, dealt to them in turn
    total: int  # samples of the global batch


class TrainLoader:
    """The training batches of this rank. The global batches are the same on any number of ranks."""

    def __init__(
        self,
        data: Data,
        dataset: Any,
        sampler: RankSampler,
        global_batch: int,
        micro_batches: int = 1,
        options: LoaderOptions = _IN_PROCESS,
    ) -> None:
        self._sampler, self._order = sampler, EpochOrder(data, dataset, sampler.seed)
        kind = RankBatches if data.mix is None else MixedRankBatches
        self._batches = kind(data, dataset, sampler, options)
        self.length = self._order.length  # samples of an epoch
        self.global_batch = global_batch
        self.steps_per_epoch = self.length // global_batch
        # first cut into micro-batches, then dealt: so a micro-batch has the same samples on any number of ranks
        self._spans = split_evenly(global_batch, micro_batches)
        self._parts = [sampler.rows(span) for span in self._spans]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The steps of one epoch, each a list of micro-batches; `start`: samples of its order that are done already."""
        order = self._order(epoch)
        some = max(1, _SLICE // self.global_batch) * self.global_batch
        for at in range(start, len(order), some):
            for step in self._batches.read(epoch, order[at : at + some], self.global_batch, self._parts):
                yield [
                    Batch(inputs, targets, indices, span, self.global_batch)
                    for (indices, inputs, targets), span in zip(step, self._spans, strict=True)
                ]

    def example(self, count: int = 2) -> tuple[Any, Any]:
        """Two samples of this rank's, as (inputs, targets) on the device: enough to see what a step touches.

        Fewer, if some rank has no more: every rank gets as many.
        """
        least = self.length // self._sampler.ranks  # samples of an epoch that every rank has
        size = min(count, least)
        global_batch = self._sampler.ranks * size
        order = self._order(0)[:global_batch]
        ((_, inputs, targets),) = next(self._batches.read(0, order, global_batch, [range(size)]))
        return inputs, targets

    def padded_sample(self) -> tuple[Batch, Batch] | None:
        """A sample in a batch of its own, and as one beside it lets it be padded; the same two on every rank.

        None where the first samples of the data are not padded, or it cannot be told.
        """
        if self._sampler.ranks * len(self._spans) == 1 or self.length < 2:
            return None  # nobody pads differently
        singles = [*self._batches.read_lists(self._order(0)[:_LOOKED_AT].long().split(1))]
        shortest, longest = min(singles, key=_sizes), max(singles, key=_sizes)
        if _sizes(shortest) == _sizes(longest):
            return None
        (together,) = self._batches.read_lists([torch.cat((shortest[0], longest[0]))])
        if not all(has_rows(tree, 2) for tree in together[1:]):
            return None
        padded = split_micro_batches(together, [range(1)])[0]
        span = range(self._sampler.ranks)
        if _sizes(padded) != _sizes(shortest):
            alone, beside = (Batch(*batch[1:], batch[0], span, len(span)) for batch in (shortest, padded))
            return alone, beside
        return None


def _sizes(batch: DeviceBatch) -> list[tuple[int, ...]]:
    """The shapes of a batch's tensors, without the samples."""
    return [tuple(x.shape[1:]) for tree in batch[1:] for _, x in named_tensors(tree, "")]


class EvalLoader:
    """The evaluation data in file order: every sample once, on any number of ranks."""

    def __init__(
        self,
        data: Data,
        dataset: Any,
        sampler: RankSampler,
        global_batch: int,
        micro_batches: int,
        options: LoaderOptions,
    ) -> None:
        self.size = dataset_size(dataset)
        self._sampler, self._global_batch = sampler, global_batch
        self.micro_batch = -(-global_batch // micro_batches)  # samples of all data ranks in one forward, at most
        self._reader = SampleReader(data, dataset, sampler, options)
        self._micro_batches = choose_micro_batches(data, dataset, sampler, self._reader)
        self._micro_spans = cache(self._cut)  # all batches but the last one have the same size

    def example(self, count: int = 2) -> tuple[Any, Any]:
        """A sample or two, as (inputs, targets) on the device, as many on every rank: enough to see a step."""
        rank, ranks = self._sampler.rank, self._sampler.ranks
        least = max(1, min(count, min(self.size, self.micro_batch) // ranks))  # samples that every rank has of a batch
        samples = range(self.size)
        return self._read_samples(torch.tensor(samples[rank::ranks][:least] or samples[-1:]))

    def smallest_batch(self, count: int = 1) -> Batch:
        """A micro-batch of so many samples of each rank; a rank without a sample takes the last of the set."""
        rank, ranks = self._sampler.rank, self._sampler.ranks
        indices = (rank + ranks * torch.arange(count)).clamp(max=self.size - 1)  # (count,)
        inputs, targets = self._read_samples(indices)
        span = range(min(ranks * count, self.size))
        return Batch(inputs, targets, indices, span, len(span))

    def least_samples(self) -> int:
        """The samples of the smallest micro-batch that any rank computes."""
        last = self.size % self._global_batch or self._global_batch
        spans = [span for total in (min(self.size, self._global_batch), last) for span, _ in self._micro_spans(total)]
        return max(1, min(map(len, spans)) // self._sampler.ranks)

    def _read_samples(self, indices: Tensor) -> tuple[Any, Any]:
        """These samples, (n,) indices, as (inputs, targets) on the device."""
        ((_, inputs, targets),) = self._reader.read(0, [indices], training=False)
        return inputs, targets

    def batches(self, numbers: Sequence[int] | None = None) -> Iterator[tuple[Batch, int]]:
        """Micro-batches of each batch, and how many of their samples count. Every rank gets as many micro-batches.

        numbers: of some batches, in order; None: all.
        """
        samples, size = range(self.size), self._global_batch
        numbers = range(len(self)) if numbers is None else numbers
        spans = [samples[number * size : (number + 1) * size] for number in numbers]
        for samples, step in zip(spans, self._read(spans), strict=True):
            for (indices, inputs, targets), (span, rows) in zip(step, self._micro_spans(len(samples)), strict=True):
                yield Batch(inputs, targets, indices, span, len(samples)), len(rows)

    def _read(self, spans: list[range]) -> Iterator[Sequence[DeviceBatch]]:
        """This rank's micro-batches of each of these spans of samples."""
        if self.micro_batch >= self._global_batch:  # a lone micro-batch is all of it
            return zip(self._reader.read(0, self._indices(spans), training=False))
        parts = ([rows or range(1) for _, rows in self._micro_spans(len(samples))] for samples in spans)
        return self._micro_batches.read(0, zip(self._indices(spans), parts, strict=True), training=False)

    def _indices(self, spans: list[range]) -> Iterator[Tensor]:
        """This rank's samples of each of these spans, (B / ranks,).

        A rank without a sample takes one that does not count, for it must compute with the others.
        """
        # many spans of one size at once, because one at a time costs more
        for size, alike in groupby(spans, len):
            local = range(size)[self._sampler.rank :: self._sampler.ranks] or range(size)[-1:]
            starts = torch.tensor([samples.start for samples in alike])  # (spans,)
            yield from RankSteps(starts[:, None] + torch.tensor(local))  # (spans, B / ranks)

    def __len__(self) -> int:
        """How many batches there are."""
        return -(-self.size // self._global_batch)

    def _cut(self, total: int) -> list[tuple[range, range]]:
        """The micro-batches of a batch, over all ranks, and this rank's rows of each: first cut, then dealt."""
        spans = [range(total)[start : start + self.micro_batch] for start in range(0, total, self.micro_batch)]
        return [(span, self._sampler.rows(span)) for span in spans]


def digest_indices(indices: Tensor) -> Tensor:
    """The sum of hashes of whole numbers, modulo 2⁶⁴: the same for every order, another one if a number stands twice.

    indices: int64, on the CPU; result: 0-d int64, whose 64 bits add up over ranks and wrap.
    """
    return mix_bits((indices + 1) * to_int64(GOLDEN)).sum()  # 0 would hash to 0 and could come as often as it liked
