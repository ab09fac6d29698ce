"""Items that are read under generators seeded for each of them alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from trainer.data.seeds import mix, seed_all


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
        with put_back() if get_worker_info() is None else nullcontext():
            seed_all(mix(self._seed, epoch, index))
            return self._dataset[index]


@contextmanager
def put_back() -> Iterator[None]:
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
