"""Reading samples: whole batches of data in memory, or item by item through worker processes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from trainer.data.data import Data
from trainer.data.seeds import mix, seed_all
from trainer.launch.signals import obey_parent_alone
from trainer.refusal import BadData


@dataclass(frozen=True)
class Loading:
    """How items are decoded. Nothing of it changes what is learned."""

    workers: int | None = None  # decoding processes a rank; None: up to 4, one core of this rank's left for the step
    prefetch: int = 2  # batches that each worker prepares ahead
    timeout: float = 0  # seconds to wait for a batch; 0: for ever


# (epoch, lists of indices) → (inputs, targets) of each list, in order, on the CPU
Read = Callable[[int, Iterable[Tensor]], Iterator[tuple[Any, Any]]]


def reading(dataset: Any, collate: Callable[[list[Any]], Any], seed: int, loading: Loading, pin: bool) -> Read:
    """How this data set is read: whole batches where it offers them or is nothing but tensors, else items."""
    if callable(batch := getattr(dataset, "batch", None)):
        return lambda epoch, lists: map(batch, lists)
    # not a subclass, nor for an own collate: either may do something else with the items
    if type(dataset) is TensorDataset and getattr(collate, "__func__", None) is Data.collate:
        return lambda epoch, lists: map(partial(_rows, dataset.tensors), lists)
    return _Items(dataset, collate, seed, loading, pin).read


def _rows(columns: Sequence[Tensor], indices: Tensor) -> Any:
    """What collating the items one by one would give: a fiftieth of the time."""
    return [column.index_select(0, indices.to(column.device)) for column in columns]


class _Items:
    """A data set that is read item by item, every item under generators seeded for it alone."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, loading: Loading, pin: bool
    ) -> None:
        # more than 4 seldom help, and the step itself needs a core
        workers = min(4, _cores() - 1) if loading.workers is None else loading.workers
        self._lists = _Lists()
        self._loader = DataLoader(
            Seeded(dataset, seed),
            batch_sampler=self._lists,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=pin,
            # torch refuses these two without workers
            timeout=loading.timeout if workers else 0,
            prefetch_factor=loading.prefetch if workers else None,
            persistent_workers=workers > 0,  # starting them costs seconds, in every epoch
            worker_init_fn=_begin_worker,
            generator=torch.Generator().manual_seed(0),  # or it would draw from the global one at every epoch
        )

    def read(self, epoch: int, lists: Iterable[Tensor]) -> Iterator[tuple[Any, Any]]:
        self._lists.set(epoch, lists)
        try:
            yield from self._loader
        except BadData as error:
            # a worker process passes its whole traceback on as the message: the sentence is its last line
            raise BadData(str(error).strip().splitlines()[-1].rpartition(f"{BadData.__name__}: ")[2]) from None


def _begin_worker(number: int) -> None:
    """A launcher signals whole process groups; a worker that obeyed would leave its rank in the middle of a step.

    Its own rank's word counts: without it a Python that goes on after an error would wait for its workers for ever.
    """
    obey_parent_alone()


def _cores() -> int:
    """The cores of this process: its machine's, over the processes there."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Lists:
    """What a DataLoader is to read: lists of (epoch, index). The epoch travels along; no worker need be told of it."""

    def __init__(self) -> None:
        self.set(0, [])

    def set(self, epoch: int, lists: Iterable[Tensor]) -> None:
        self._epoch, self._indices = epoch, lists

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self._indices:
            yield [(self._epoch, index) for index in indices.tolist()]


class Seeded(Dataset):
    """A data set whose item (epoch, i) is read with all generators (Python, NumPy, torch) seeded from (seed, epoch, i).

    So a random transform gives a sample the same picture on every rank, in every worker, in every order. In the main
    process the generators are put back afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: tuple[int, int]) -> Any:
        epoch, index = at
        # nothing else draws in a worker; in the main process the network may (dropout), so its numbers are put back
        with _put_back() if get_worker_info() is None else nullcontext():
            seed_all(mix(self._seed, epoch, index))
            return self._dataset[index]


@contextmanager
def _put_back() -> Iterator[None]:
    """Leave the generators of the CPU as they are met."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])
