"""Seeds that follow from numbers alone: where randomness comes from, so that no state of it needs saving.

All of it is SplitMix64 (Steele, Lea, Flood 2014): a counter that grows by the golden ratio, and a mixing of its bits,
for whole numbers (`mix`) and for tensors (`mixed`) alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.devices import generator_of

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it lie as evenly as can be
POSITIVE = 2**63 - 1  # all bits but the sign
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of the paper
_WORD = 2**64 - 1  # Python's whole numbers have no end: this cuts them to 64 bits


def mix(*numbers: int) -> int:
    """Hash whole numbers into 63 bits; their order counts."""
    word = 0
    for number in numbers:
        word = (word + (number + 1) * GOLDEN) & _WORD
        word = ((word ^ (word >> 30)) * _FIRST) & _WORD
        word = ((word ^ (word >> 27)) * _SECOND) & _WORD
        word ^= word >> 31
    return word & POSITIVE


def mixed(words: Tensor) -> Tensor:
    """The same mixing of int64 words of any shape; torch's shifts keep the sign, so masks take it away."""
    words = ((words >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(words)).mul_(signed(_FIRST))
    words = ((words >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(words)).mul_(signed(_SECOND))
    return (words >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(words)


def signed(word: int) -> int:
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
        generator_of(torch.device("cuda", index)).manual_seed(mix(torch.initial_seed(), index))


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; NumPy's only where somebody has imported it."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
