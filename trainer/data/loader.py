"""Batches of this rank: its samples of each global batch, on the device, augmented, in micro-batches.

`TrainLoader` is for training, `EvalLoader` for an evaluation. Both use `SampleReader`, which reads lists of indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions, is_read_by_item, make_reader
from trainer.data.nested_tensors import has_rows, named_tensors, select_rows, slice_rows, to_device
from trainer.data.rng import GOLDEN, Random, mix_bits, mix_seeds, to_int64
from trainer.data.sampler import EpochOrder, RankSampler, RankSteps, dataset_size, split_evenly
from trainer.launch.devices import uses_pinned_memory
from trainer.messages import Refusal, format_count

MIX_SEED = 0x6D6978  # so that the numbers of mixing (Data.mix) are others than those of augmenting

DeviceBatch = tuple[Tensor, Any, Any]  # indices (B,) on the CPU; inputs and targets (B, …) on the device
IndexedBatch = tuple[Tensor, Sequence[range]]  # indices of a rank's batch (B,); the rows of each of its micro-batches


class SampleReader:
    """Reads lists of indices: samples on the device, augmented there."""

    def __init__(self, data: Data, dataset: Any, sampler: RankSampler, options: LoaderOptions) -> None:
        self._data, self._device, self._seed = data, sampler.device, sampler.seed
        pin = uses_pinned_memory(sampler.device)
        self._read = make_reader(dataset, data.collate, sampler.seed, options, pin)
        # are samples as they were read what a step needs?
        self._is_ready = sampler.device.type == "cpu" and type(data).augment is Data.augment

    def read(self, epoch: int, lists: Iterable[Tensor], training: bool) -> Iterator[DeviceBatch]:
        """(indices, inputs, targets) of each list, in order; the indices stay on the CPU."""
        # workers read ahead: the lists are needed once by them and once here
        lists, ahead = tee(lists)
        read = zip(lists, self._read(epoch, ahead), strict=True)
        if self._is_ready:
            return ((indices, inputs, targets) for indices, (inputs, targets) in read)
        return self._augment(epoch, read, training)

    def _augment(self, epoch: int, read: Iterable[Any], training: bool) -> Iterator[DeviceBatch]:
        for indices, (inputs, targets) in read:
            inputs, targets, device_indices = to_device((inputs, targets, indices), self._device)
            random = Random(self._seed, epoch, device_indices)
            # all samples of a list at once: a kernel for each sample would cost as many launches
            yield indices, *self._data.augment(inputs, targets, random, training)


class SeparateMicroBatches:
    """Each micro-batch is read and collated from its own items: only `collate` knows where a sample lies."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def read(self, epoch: int, batches: Iterable[IndexedBatch], training: bool) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of each batch."""
        batches, ahead = tee(batches)
        lists = (indices[_as_slice(rows)] for indices, parts in ahead for rows in parts)
        micro_batches = self._reader.read(epoch, lists, training)
        for _, parts in batches:
            yield list(islice(micro_batches, len(parts)))


class CutMicroBatches:
    """A batch is read and augmented at once, which saves kernels, and then cut into micro-batches."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def read(self, epoch: int, batches: Iterable[IndexedBatch], training: bool) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of each batch."""
        batches, ahead = tee(batches)
        whole = self._reader.read(epoch, (indices for indices, _ in ahead), training)
        for batch, (_, parts) in zip(whole, batches, strict=True):
            yield self._cut(epoch, batch, parts, training)

    def _cut(self, epoch: int, batch: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        size = batch[0].numel()
        if list(parts) == [range(size)]:
            return [batch]  # a lone micro-batch is all of it
        if all(has_rows(tree, size) for tree in batch[1:]):
            return split_micro_batches(batch, parts)
        return self._read_uncut(epoch, batch, parts, training)

    def _read_uncut(self, epoch: int, batch: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        """What cannot be cut is read again, each micro-batch by itself."""
        return list(self._reader.read(epoch, [batch[0][_as_slice(rows)] for rows in parts], training))


class SameShapeMicroBatches(CutMicroBatches):
    """The same for items, where micro-batches must have one shape (a pipeline): they are padded together."""

    def _read_uncut(self, epoch: int, batch: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        raise Refusal(
            f"the {len(parts)} micro-batches of a pipeline must have one shape, so they are cut from one batch, and"
            f" {_describe_uncut(batch)}; strategy=ddp and strategy=fsdp take each micro-batch from its own items"
        )


def choose_micro_batches(
    data: Data, dataset: Any, sampler: RankSampler, reader: SampleReader
) -> SeparateMicroBatches | CutMicroBatches:
    """How batches of this data set become micro-batches on this rank."""
    if not is_read_by_item(dataset, data.collate):
        return CutMicroBatches(reader)
    return (SameShapeMicroBatches if sampler.same_shape else SeparateMicroBatches)(reader)


class RankBatches:
    """This rank's samples of each global batch, in micro-batches."""

    def __init__(self, data: Data, dataset: Any, sampler: RankSampler, options: LoaderOptions) -> None:
        self._data, self._sampler = data, sampler
        self._reader = SampleReader(data, dataset, sampler, options)
        self._micro_batches = choose_micro_batches(data, dataset, sampler, self._reader)

    def read(self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of this rank, for each whole global batch of an order (N,).

        parts: which rows of this rank's batch each micro-batch has.
        """
        steps = self._sampler.steps(order, global_batch)
        if len(parts) == 1:  # a lone micro-batch is all of it
            return ([batch] for batch in self._reader.read(epoch, steps, training=True))
        batches = ((indices, parts) for indices in steps)
        return self._micro_batches.read(epoch, batches, training=True)


class MixedRankBatches(RankBatches):
    """The same, each sample mixed with its partner (`Data.mix`): the sample half a global batch later.

    As a rule this rank has the partner, too. If another rank has it, it is read and augmented here once more. So
    nothing is sent, and a sample is the same on any number of ranks.
    """

    def read(self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]) -> Iterator[list[DeviceBatch]]:
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


def split_micro_batches(batch: DeviceBatch, parts: Sequence[range]) -> list[DeviceBatch]:
    """Cut a batch into micro-batches of these rows."""
    indices, *trees = batch
    size = len(indices)
    return [(indices[_as_slice(rows)], *slice_rows(trees, rows.start, rows.stop, size)) for rows in parts]


def _as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _refuse_unmixed(batch: DeviceBatch) -> None:
    """Refuse to mix what has no partner's rows. Lists of tensors are taken for views of all samples."""
    size = len(batch[0])
    if any(x.shape[:1] != (size,) for tree in batch[1:] for _, x in named_tensors(tree, "")):
        raise Refusal(
            "the data mixes samples with partners, which must be rows of its tensors (B, …), and"
            f" {_describe_uncut(batch)}; let collate stack the samples, or do without mix"
        )


def _describe_uncut(batch: DeviceBatch) -> str:
    """What of a batch may not have a row for each sample, in words."""
    size = len(batch[0])
    for name, tree in zip(("inputs", "targets"), batch[1:], strict=True):
        if not has_rows(tree, size):
            for place, x in named_tensors(tree, name):
                if x.shape[:1] != (size,):
                    return f"of {format_count(size, 'sample')} {place} has the shape {tuple(x.shape)}"
            kind = type(tree).__name__
            return f"of {format_count(size, 'sample')} the {name} are a {kind} that is not one tensor (B, …)"
    return "a batch has no rows"


_IN_PROCESS = LoaderOptions(workers=0)


class Batch(NamedTuple):
    """A micro-batch of this rank, on the device, and which samples it has."""

    inputs: Any  # (B, …)
    targets: Any
    indices: Tensor  # (B,) of the data set, on the CPU
    span: range  # samples of the global batch that all data ranks have of this micro-batch, dealt to them in turn
    total: int  # samples of the global batch
    continues: bool = False  # is there a batch before it in its epoch or evaluation, whose rows it may go on from?


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
        order = self._order(epoch)[start:]
        steps = self._batches.read(epoch, order, self.global_batch, self._parts)
        for done, step in enumerate(steps):
            yield [
                Batch(inputs, targets, indices, span, self.global_batch, start + done > 0)
                for (indices, inputs, targets), span in zip(step, self._spans, strict=True)
            ]

    def example(self) -> tuple[Any, Any]:
        """Two samples of this rank's, as (inputs, targets) on the device: enough to see what a step touches.

        One sample, if some rank has no more: every rank gets as many.
        """
        least = self.length // self._sampler.ranks  # samples of an epoch that every rank has
        size = min(2, least)
        global_batch = self._sampler.ranks * size
        order = self._order(0)[:global_batch]
        ((_, inputs, targets),) = next(self._batches.read(0, order, global_batch, [range(size)]))
        return inputs, targets


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

    def example(self) -> tuple[Any, Any]:
        """A sample or two, as (inputs, targets) on the device, as many on every rank: enough to see a step."""
        rank, ranks = self._sampler.rank, self._sampler.ranks
        least = max(1, min(2, min(self.size, self.micro_batch) // ranks))  # samples that every rank has of a batch
        samples = range(self.size)
        return self.read_samples(torch.tensor(samples[rank::ranks][:least] or samples[-1:]))

    def smallest_batch(self) -> Batch:
        """A micro-batch of one sample of each rank; a rank without a sample takes the last of the set."""
        index = min(self._sampler.rank, self.size - 1)
        inputs, targets = self.read_samples(torch.tensor([index]))
        span = range(min(self._sampler.ranks, self.size))
        return Batch(inputs, targets, torch.tensor([index]), span, len(span))

    def read_samples(self, indices: Tensor) -> tuple[Any, Any]:
        """These samples, (n,) indices, as (inputs, targets) on the device. Not collective: for one rank alone."""
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
                yield Batch(inputs, targets, indices, span, len(samples), samples.start > 0), len(rows)

    def _read(self, spans: list[range]) -> Iterator[list[DeviceBatch]]:
        """This rank's micro-batches of each of these spans of samples."""
        if self.micro_batch >= self._global_batch:  # a lone micro-batch is all of it
            return ([batch] for batch in self._reader.read(0, self._indices(spans), training=False))
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
