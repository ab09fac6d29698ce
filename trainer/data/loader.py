"""Epochs of global batches: this rank's share of each, in micro-batches, augmented, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions, is_read_by_item, make_reader
from trainer.data.nested_tensors import has_rows, named_tensors, select_rows, slice_rows, to_device
from trainer.data.rng import GOLDEN, Random, mix_bits, mix_seeds, to_int64
from trainer.data.sampler import EpochOrder, RankSampler, dataset_size, split_evenly
from trainer.launch.devices import uses_pinned_memory
from trainer.messages import Refusal, format_count

MIXING = 0x6D6978  # sets the numbers of mixing apart from those of augmenting

DeviceBatch = tuple[Tensor, Any, Any]  # indices on the CPU; inputs and targets on the device
IndexedBatch = tuple[Tensor, Sequence[range]]  # the indices of a share, and which of them each of its micro-batches has


class SampleReader:
    """Reads lists of indices: samples on the device, augmented there."""

    def __init__(self, data: Data, dataset: Any, own: RankSampler, loading: LoaderOptions) -> None:
        self._data, self._device, self._seed = data, own.device, own.seed
        self._read = make_reader(dataset, data.collate, own.seed, loading, pin=uses_pinned_memory(own.device))

    def read(self, epoch: int, lists: Iterable[Tensor], training: bool) -> Iterator[DeviceBatch]:
        """(indices, inputs, targets) of each list, in order; the indices stay on the CPU."""
        lists, ahead = tee(lists)
        for indices, (inputs, targets) in zip(lists, self._read(epoch, ahead), strict=True):
            inputs, targets, there = to_device((inputs, targets, indices), self._device)
            # All samples of a list at once: a kernel for each sample would cost as many launches.
            yield indices, *self._data.augment(inputs, targets, Random(self._seed, epoch, there), training)


class SeparateMicroBatches:
    """Micro-batches that are each collated from their own items: only what collates knows where a sample lies."""

    def __init__(self, samples: SampleReader) -> None:
        self._samples = samples

    def read(self, epoch: int, cuts: Iterable[IndexedBatch], training: bool) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of each share."""
        cuts, ahead = tee(cuts)
        read = self._samples.read(
            epoch, (indices[_as_slice(own)] for indices, parts in ahead for own in parts), training
        )
        for _, parts in cuts:
            yield list(islice(read, len(parts)))


class CutMicroBatches:
    """Shares that are read and augmented at once, for else each micro-batch would cost as many kernels; then cut."""

    def __init__(self, samples: SampleReader) -> None:
        self._samples = samples

    def read(self, epoch: int, cuts: Iterable[IndexedBatch], training: bool) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of each share."""
        cuts, ahead = tee(cuts)
        shares = self._samples.read(epoch, (indices for indices, _ in ahead), training)
        for share, (_, parts) in zip(shares, cuts, strict=True):
            yield self._cut(epoch, share, parts, training)

    def _cut(self, epoch: int, share: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        size = len(share[0])
        if list(parts) == [range(size)]:
            return [share]  # a lone micro-batch is all of it
        if all(has_rows(tree, size) for tree in share[1:]):
            return split_micro_batches(share, parts)
        return self._otherwise(epoch, share, parts, training)

    def _otherwise(self, epoch: int, share: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        """Of what cannot be cut the set is asked for each micro-batch by itself."""
        return list(self._samples.read(epoch, [share[0][_as_slice(own)] for own in parts], training))


class SameShapeMicroBatches(CutMicroBatches):
    """The same of items, where micro-batches must have one shape: they are padded together."""

    def _otherwise(self, epoch: int, share: DeviceBatch, parts: Sequence[range], training: bool) -> list[DeviceBatch]:
        raise Refusal(
            f"the {len(parts)} micro-batches of a pipeline must have one shape, so they are cut from one batch, and"
            f" {_describe_unsplittable(share)}; strategy=ddp and strategy=fsdp take each micro-batch from its own items"
        )


def make_micro_batching(
    data: Data, dataset: Any, own: RankSampler, samples: SampleReader
) -> SeparateMicroBatches | CutMicroBatches:
    """How shares of this set become micro-batches on this rank."""
    if not is_read_by_item(dataset, data.collate):
        return CutMicroBatches(samples)
    return (SameShapeMicroBatches if own.alike else SeparateMicroBatches)(samples)


class RankBatches:
    """A rank's share of each global batch of an order."""

    def __init__(self, data: Data, dataset: Any, own: RankSampler, loading: LoaderOptions) -> None:
        self._data, self._samples, self._own = data, SampleReader(data, dataset, own, loading), own
        self._cutting = make_micro_batching(data, dataset, own, self._samples)

    def read(self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of this rank, for each whole global batch; parts: the rows of its share in each."""
        cuts = ((indices, parts) for indices in self._own.steps(order, global_batch))
        return self._cutting.read(epoch, cuts, training=True)


class MixedRankBatches(RankBatches):
    """The same, each sample mixed with its partner: the one half a global batch further on.

    As a rule this rank holds it too. Where another one does, it is read and augmented here once more. So nothing need
    be sent, and a sample is the same whatever the number of ranks.
    """

    def read(self, epoch: int, order: Tensor, global_batch: int, parts: Sequence[range]) -> Iterator[list[DeviceBatch]]:
        """The micro-batches of this rank, for each whole global batch."""
        assert self._data.mix is not None
        needed, partners = self._own.pairs(global_batch)
        size, count = len(needed), len(partners)
        partners = to_device(partners, self._own.device)
        lists = self._own.steps(order, global_batch, needed)
        for indices, *both in self._samples.read(epoch, lists, training=True):
            _refuse_unmixed((indices, *both))
            own = indices[:count]
            random = Random(mix_seeds(self._own.seed, MIXING), epoch, to_device(own, self._own.device))
            inputs, targets = slice_rows(both, 0, count, size)
            others, other_targets = select_rows(both, partners, size)
            yield split_micro_batches((own, *self._data.mix(inputs, targets, others, other_targets, random)), parts)


def make_rank_batches(data: Data, dataset: Any, own: RankSampler, loading: LoaderOptions) -> RankBatches:
    """Shares as they are read, or mixed, where the data mixes."""
    return (RankBatches if data.mix is None else MixedRankBatches)(data, dataset, own, loading)


def split_micro_batches(share: DeviceBatch, parts: Sequence[range]) -> list[DeviceBatch]:
    """These rows of a share, a micro-batch each."""
    indices, *trees = share
    size = len(indices)
    return [(indices[_as_slice(own)], *slice_rows(trees, own.start, own.stop, size)) for own in parts]


def _as_slice(own: range) -> slice:
    return slice(own.start, own.stop)


def _refuse_unmixed(share: DeviceBatch) -> None:
    """Refuse to mix what has no partner's rows. Lists of tensors are taken for views of all samples."""
    size = len(share[0])
    if any(x.shape[:1] != (size,) for tree in share[1:] for _, x in named_tensors(tree, "")):
        raise Refusal(
            "the data mixes samples with partners, which must be rows of its tensors (B, …), and"
            f" {_describe_unsplittable(share)}; let collate stack the samples, or do without mix"
        )


def _describe_unsplittable(share: DeviceBatch) -> str:
    """What of a share is not certain to have a row for each sample, in words."""
    size = len(share[0])
    for name, tree in zip(("inputs", "targets"), share[1:], strict=True):
        if not has_rows(tree, size):
            for place, x in named_tensors(tree, name):
                if x.shape[:1] != (size,):
                    return f"of {format_count(size, 'sample')} {place} has the shape {tuple(x.shape)}"
            kind = type(tree).__name__
            return f"of {format_count(size, 'sample')} the {name} are a {kind} that is not one tensor (B, …)"
    return "a batch has no rows"


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
