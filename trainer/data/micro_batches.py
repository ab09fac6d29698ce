"""Lists of samples, read and augmented on the device, and batches of them as micro-batches.

`SampleReader` reads lists of indices. The other classes say how a batch becomes micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any

from torch import Tensor

from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions, is_read_by_item, make_reader
from trainer.data.nested_tensors import has_rows, named_tensors, slice_rows, to_device
from trainer.data.rng import Random
from trainer.data.sampler import RankSampler
from trainer.launch.devices import uses_pinned_memory
from trainer.messages import Refusal, format_count

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
        read = self._read(epoch, lists)
        return read if self._is_ready else self._augment(epoch, read, training)

    def _augment(self, epoch: int, read: Iterable[DeviceBatch], training: bool) -> Iterator[DeviceBatch]:
        for indices, inputs, targets in read:
            inputs, targets, device_indices = to_device((inputs, targets, indices), self._device)
            random = Random(self._seed, epoch, device_indices)
            # all samples of a list at once: a kernel for each sample would cost as many launches
            yield indices, *self._data.augment(inputs, targets, random, training)


class SeparateMicroBatches:
    """Each micro-batch is read and collated from its own items: only `collate` knows where a sample lies."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def read(self, epoch: int, batches: Iterable[IndexedBatch], training: bool) -> Iterator[Sequence[DeviceBatch]]:
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

    def read(self, epoch: int, batches: Iterable[IndexedBatch], training: bool) -> Iterator[Sequence[DeviceBatch]]:
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
            f" {describe_uncut(batch)}; strategy=ddp and strategy=fsdp take each micro-batch from its own items"
        )


def choose_micro_batches(
    data: Data, dataset: Any, sampler: RankSampler, reader: SampleReader
) -> SeparateMicroBatches | CutMicroBatches:
    """How batches of this data set become micro-batches on this rank."""
    if not is_read_by_item(dataset, data.collate):
        return CutMicroBatches(reader)
    return (SameShapeMicroBatches if sampler.same_shape else SeparateMicroBatches)(reader)


def split_micro_batches(batch: DeviceBatch, parts: Sequence[range]) -> list[DeviceBatch]:
    """Cut a batch into micro-batches of these rows."""
    indices, *trees = batch
    size = len(indices)
    return [(indices[_as_slice(rows)], *slice_rows(trees, rows.start, rows.stop, size)) for rows in parts]


def _as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def describe_uncut(batch: DeviceBatch) -> str:
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
