"""Seeds that follow from numbers alone, and items that are read under generators seeded for each of them.

All of it is SplitMix64 (Steele, Lea, Flood 2014): a counter that grows by the golden ratio, and a mixing of its bits,
for whole numbers (`mix`) and for tensors (`mixed`) alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from trainer.launch.devices import default_generator

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it lie as evenly as can be
POSITIVE = 2**63 - 1  # all bits but the sign
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of the paper
_WORD = 2**64 - 1  # Python's whole numbers have no end: this cuts them to 64 bits


def mix_seeds(*numbers: int) -> int:
    """Hash whole numbers into 63 bits; their order counts."""
    word = 0
    for number in numbers:
        word = (word + (number + 1) * GOLDEN) & _WORD
        word = ((word ^ (word >> 30)) * _FIRST) & _WORD
        word = ((word ^ (word >> 27)) * _SECOND) & _WORD
        word ^= word >> 31
    return word & POSITIVE


def mix_bits(words: Tensor) -> Tensor:
    """The same mixing of int64 words of any shape; torch's shifts keep the sign, so masks take it away."""
    words = ((words >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(words)).mul_(to_int64(_FIRST))
    words = ((words >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(words)).mul_(to_int64(_SECOND))
    return (words >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(words)


def to_int64(word: int) -> int:
    """The same 64 bits as the int64 that torch understands."""
    word &= _WORD
    return word - 2**64 if word > POSITIVE else word


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of the current device; a tenth of the cost of `torch.manual_seed`."""
    # torch.manual_seed asks for every backend that there is, and this runs in each step of a network that draws.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def seed_more_gpus(indices: Iterable[int]) -> None:
    """Seed further CUDA GPUs, each otherwise, from the seed that the CPU's generator was given last."""
    for index in indices:
        default_generator(torch.device("cuda", index)).manual_seed(mix_seeds(torch.initial_seed(), index))


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; NumPy's only where somebody has imported it."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class SeededDataset(Dataset):
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
        with preserve_rng_state() if get_worker_info() is None else nullcontext():
            seed_all(mix_seeds(self._seed, epoch, index))
            return self._dataset[index]


@contextmanager
def preserve_rng_state() -> Iterator[None]:
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
