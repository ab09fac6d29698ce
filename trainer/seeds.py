"""Seeds that follow from numbers alone: where randomness comes from, so that no state of it needs saving."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash whole numbers into 63 bits, in this order (the finalizer of SplitMix64 after each)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device; a tenth of the cost of `torch.manual_seed`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
