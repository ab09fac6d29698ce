"""How the numbers of tensors are distributed, of tensors of which ranks hold shards, copies or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks

BINS = 64  # of equal width, from the smallest number to the largest


class Histogram(NamedTuple):
    """How many numbers of a tensor lie where."""

    low: float  # the smallest number
    high: float  # the largest
    counts: list[float]  # in each of BINS
    sum: float
    squares: float  # the sum of them


def histograms(
    held: Mapping[str, Tensor], sizes: Mapping[str, int], factor: float, ranks: Ranks
) -> dict[str, Histogram]:
    """Collective: the histograms of whole tensors; what is no finite number is not counted.

    held: what this rank holds of each, a part, all or nothing; every number of a tensor must be held as often. sizes:
    numbers of the whole tensors, by all names, the same on every rank. factor: what all numbers are multiplied by.
    """
    names, own = sorted(sizes), {name: _finite(tensor) for name, tensor in held.items()}
    low, high = _limits(names, own, ranks)
    counted = torch.zeros(len(names), BINS + 3, dtype=torch.float64)  # a row: bins, sum, squares, numbers held
    for at, name in enumerate(names):
        if name in held:
            counted[at, :-1] = _counted(own[name], low[at], high[at])
            counted[at, -1] = held[name].numel()
    ranks.all_reduce_sum_(counted).wait()  # all ranks; 8 bytes a bin
    found: dict[str, Histogram] = {}
    for at, name in enumerate(names):
        # what several ranks hold was counted as often
        copies = float(counted[at, -1]) / max(sizes[name], 1)
        if copies and low[at] <= high[at]:
            *counts, total, squares = (counted[at, :-1] / copies).tolist()
            found[name] = Histogram(low[at] * factor, high[at] * factor, counts, total * factor, squares * factor**2)
    return found


def _finite(tensor: Tensor) -> Tensor:
    """The finite numbers of a tensor, flat, in a type that has room for their sum."""
    numbers = tensor.detach().float().flatten() if tensor.dtype != torch.float64 else tensor.detach().flatten()
    return numbers[numbers.isfinite()]


def _limits(names: Sequence[str], own: Mapping[str, Tensor], ranks: Ranks) -> tuple[list[float], list[float]]:
    """Collective: the smallest and the largest number of each tensor, inf and -inf where there is none."""
    limits = torch.full((2, len(names)), -torch.inf, dtype=torch.float64)
    for at, name in enumerate(names):
        if name in own and own[name].numel():
            low, high = own[name].aminmax()
            limits[0, at], limits[1, at] = -low.double().cpu(), high.double().cpu()
    ranks.all_reduce_max_(limits).wait()  # all ranks; two numbers a tensor
    return (-limits[0]).tolist(), limits[1].tolist()


def _counted(numbers: Tensor, low: float, high: float) -> Tensor:
    """How many lie in each bin, their sum and that of their squares: (BINS + 2,) float64 on the CPU."""
    width = (high - low) / BINS or 1.0  # of equal numbers all lie in the first
    places = ((numbers - low) / width).long().clamp_(0, BINS - 1)
    bins = torch.bincount(places, minlength=BINS).double().cpu()
    return torch.cat([bins, torch.stack([numbers.sum(), numbers.square().sum()]).double().cpu()])
