"""What a rank reads of each batch: its share, in micro-batches, augmented on the device, and mixed if asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any

from torch import Tensor

from trainer.data.data import Data
from trainer.data.nested_tensors import has_rows, to_device, named_tensors, select_rows, slice_rows
from trainer.data.reader import LoaderOptions, is_read_by_item, make_reader
from trainer.data.sample_order import RankSampler
from trainer.data.sample_random import Random
from trainer.data.seeds import mix_seeds
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
