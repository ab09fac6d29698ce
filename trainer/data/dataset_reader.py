"""Reads a data set: whole batches of what is in memory, or item by item through worker processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trainer.data.data import Data, find_batch_method
from trainer.data.rng import SeededDataset
from trainer.launch.stop_signals import obey_parent_only
from trainer.messages import BadData, Refusal, format_count

_MAX_WORKERS = 32  # of a rank, if the configuration leaves the number to us: machines have 24 to 28 cores for each GPU


@dataclass(frozen=True)
class LoaderOptions:
    """How items are decoded. Nothing of it changes what is learned."""

    workers: int | None = None  # decoding processes of a rank; None: up to 32, and one core is left for the step
    prefetch: int = 2  # micro-batches that each worker prepares ahead
    timeout: float = 0  # seconds to wait for a micro-batch; 0: for ever


# (epoch, lists of indices) → (indices, inputs, targets) of each list, in order, on the CPU
Read = Callable[[int, Iterable[Tensor]], Iterator[tuple[Tensor, Any, Any]]]


def make_reader(
    dataset: Any, collate: Callable[[list[Any]], Any], seed: int, loading: LoaderOptions, pin: bool
) -> Read:
    """How this data set is read: in whole batches if it offers them or is nothing but tensors, else by item."""
    if is_read_by_item(dataset, collate):
        return _ItemReader(dataset, collate, seed, loading, pin).read
    if batch := find_batch_method(dataset):
        return lambda epoch, lists: ((indices, *batch(indices)) for indices in lists)
    if len(dataset.tensors) != 2:
        raise _not_a_pair(dataset.tensors)
    return lambda epoch, lists: _index_columns(dataset.tensors, lists)


def _not_a_pair(batch: Any) -> Refusal:
    """What to say of samples, or of a batch of them, that are no (input, target)."""
    if isinstance(batch, Mapping):
        got = f"a dict of {', '.join(map(str, batch))}"
    else:
        got = format_count(len(batch), "part") if isinstance(batch, tuple | list) else f"a {type(batch).__name__} alone"
    return Refusal(
        f"data: a sample is (input, target), and this set gives {got}. Both may be dicts, tuples or lists of tensors;"
        " where there is no target, give the input twice. Or a method collate(self, items) of the data makes a pair"
    )


def is_read_by_item(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Is this data set read item by item, and collated?"""
    # not a subclass, nor with another collate: either may do something else with the items
    is_plain = type(dataset) is TensorDataset and getattr(collate, "__func__", None) is Data.collate
    return not is_plain and not find_batch_method(dataset)


_MANY_BYTES = 2**18  # of a column that are indexed at once: they stay in the processor's cache until they are needed
_ALIGNED = 64  # bytes, as torch's allocator aligns


def _index_columns(columns: Sequence[Tensor], lists: Iterable[Tensor]) -> Iterator[Any]:
    """What collating the items of each list one by one would give, in a twentieth of the time.

    Small batches are indexed many at once, and cut: to call a kernel costs more than the rows.
    """
    lists, count = iter(lists), 1
    while some := list(islice(lists, count)):
        indices, sizes = torch.cat(some), [each.numel() for each in some]  # (samples of all these lists,)
        read = [column.index_select(0, indices.to(column.device)) for column in columns]
        # unsafe: of parts that autograd knows as such none may be changed in place by what has a gradient
        parts = (torch.unsafe_split_with_sizes(column, sizes) for column in read)
        yield from zip(some, *parts, strict=True)
        count = _count_lists([column.nbytes // len(some) for column in read])


def _count_lists(sizes: Sequence[int]) -> int:
    """How many lists to read at once; sizes: bytes of one list in each column."""
    # Cut elsewhere than where torch begins a tensor, products may be rounded in another way, and a resumed run cuts
    # at other places.
    is_aligned = not any(size % _ALIGNED for size in sizes)
    return max(1, _MANY_BYTES // max(1, *sizes)) if is_aligned else 1


class _ItemReader:
    """A data set that is read item by item, each with random generators that are seeded for it alone."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, loading: LoaderOptions, pin: bool
    ) -> None:
        # the step itself needs a core; each worker needs memory for what it reads ahead
        workers = min(_MAX_WORKERS, _count_cores() - 1) if loading.workers is None else loading.workers
        self._lists = _EpochBatchSampler()
        self._loader = DataLoader(
            SeededDataset(dataset, seed),
            batch_sampler=self._lists,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=pin,
            # torch refuses these two without workers
            timeout=loading.timeout if workers else 0,
            prefetch_factor=loading.prefetch if workers else None,
            persistent_workers=workers > 0,  # starting them costs seconds, in every epoch
            worker_init_fn=_init_worker,
            generator=torch.Generator().manual_seed(0),  # or it would draw from the global one at every epoch
        )

    def read(self, epoch: int, lists: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any, Any]]:
        # workers read ahead: the lists are needed once by them and once here
        lists, ahead = tee(lists)
        # workers stay alive between epochs: new lists reach them through the batch sampler
        self._lists.set(epoch, ahead)
        try:
            for indices, batch in zip(lists, self._loader, strict=True):
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    raise _not_a_pair(batch)
                yield indices, *batch
        except BadData as error:
            # a worker process passes its whole traceback on as the message: the sentence is its last line
            raise BadData(str(error).strip().splitlines()[-1].rpartition(f"{BadData.__name__}: ")[2]) from None


def _init_worker(number: int) -> None:
    """Prepare a worker process: it ends when its rank tells it to, not when a launcher signals the process group.

    A worker that obeyed the launcher would leave its rank in the middle of a step. It must obey its rank, or a Python
    that goes on after an error would wait for its workers for ever.
    """
    obey_parent_only()
    # Tensors are handed over by a socket file in a folder below TMPDIR. Its path is at most 103 bytes on every system:
    # a worker whose TMPDIR is too long for it would give nothing, and its rank would wait. Python 3.14 does the same.
    if len(os.fsencode(tempfile.gettempdir())) > 103 - len("/pymp-12345678/listener-12345678"):
        tempfile.tempdir = "/tmp"


def _count_cores() -> int:
    """How many cores this process has: those that it may use, divided by the processes of the run that share them.

    torchrun (`--numa-binding`) and Slurm may have given each its own: then they are divided already.
    """
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return max(1, (os.cpu_count() or 1) // count)
    usable, parent = os.sched_getaffinity(0), os.getppid()
    try:
        # the processes of the run are the children of one launcher
        siblings = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        sharing = sum(not usable.isdisjoint(os.sched_getaffinity(pid)) for pid in siblings)
    except OSError:  # the system does not tell, or one has just ended
        siblings, sharing = [], count
    # where something stands between the launcher and the processes nobody knows whose cores these are
    return max(1, len(usable) // (sharing if len(siblings) == count else count))


class _EpochBatchSampler:
    """The batch sampler of a DataLoader: lists of (epoch, index). So workers learn the epoch with each item."""

    def __init__(self) -> None:
        self.set(0, [])

    def set(self, epoch: int, lists: Iterable[Tensor]) -> None:
        self._epoch, self._indices = epoch, lists

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self._indices:
            yield [(self._epoch, index) for index in indices.tolist()]
