"""Seeds that follow from numbers alone: where randomness comes from, so that no state of it needs saving."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import torch

from trainer.data.splitmix import GOLDEN, POSITIVE, mixed_int


def mix(*numbers: int) -> int:
    """Hash whole numbers into 63 bits; their order counts."""
    state = 0
    for number in numbers:
        state = mixed_int(state + number * GOLDEN + GOLDEN)
    return state & POSITIVE


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device; a tenth of the cost of `torch.manual_seed`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_more_gpus(indices: Iterable[int]) -> None:
    """Seed further GPUs, each otherwise, from the seed that the CPU's generator was given last."""
    for index in indices:
        torch.cuda.default_generators[index].manual_seed(mix(torch.initial_seed(), index))


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; NumPy's only where somebody has imported it."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # a tenth of the cost of torch.manual_seed
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
