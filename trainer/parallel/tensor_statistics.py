"""Facts about the numbers of tensors: are they finite, what their bits come to, how they are distributed.

The first two look at what this rank holds; histograms are of whole tensors, of which ranks hold shards or copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.batch_norm import running_statistics
from trainer.parallel.device_mesh import to_local
from trainer.parallel.optimizer_state import EMA_PREFIX, OPTIMIZER_PREFIX, STRATEGY_PREFIX
from trainer.parallel.ranks import Ranks


def trained_tensors(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that training changes: all their numbers must be finite.

    Trainable parameters, BatchNorm's running statistics, the averages of both, and the memories of optimizer and
    strategy. Other buffers and frozen parameters may be infinite by design (masks of -inf, a best value that starts at
    inf), and so may lone numbers that an optimizer keeps.
    """
    trainable = {name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad}
    trained = trainable | running_statistics(network).keys()
    return {
        name: x
        for name, x in state.items()
        if name in trained or (name.startswith((OPTIMIZER_PREFIX, EMA_PREFIX, STRATEGY_PREFIX)) and x.ndim)
    }


def find_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors of which this rank's part holds NaN or infinity. Waits for the device."""
    # one type and device at a time: their answers are one number to wait for; an empty shard has no extremes
    alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        local = to_local(tensor).detach()
        if local.is_floating_point() and local.numel():
            local = local.float() if local.itemsize == 1 else local  # torch compares no float8
            alike.setdefault((local.device, local.dtype), {})[name] = local
    # both extremes are finite only where all numbers are, and aminmax is one pass: 8 times as fast as isfinite
    extremes = {kind: torch.stack([torch.stack(x.aminmax()) for x in local.values()]) for kind, local in alike.items()}
    broken = [alike[kind] for kind, each in extremes.items() if not each.isfinite().all()]
    return [name for local in broken for name, x in local.items() if not x.isfinite().all()]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the type of so many bytes
_CHUNK = 2**20  # numbers
_WIDE = 4  # bytes of numbers that are added up in their own type: in a wider one it takes four times as long


def _local_integers(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, its bits read as whole numbers, in the same shape."""
    local = to_local(tensor).detach()
    local = torch.view_as_real(local) if local.is_complex() else local
    return local.view(_INTEGERS[local.itemsize])


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name the sum of the bits that this rank holds, read as whole numbers: 0-d int64, on the tensor's device.

    Sums wrap. One bit that differs always shows; several cancel each other out about once in 2³².
    """
    sums = {}
    for name, tensor in tensors.items():
        integers = _local_integers(tensor)
        sums[name] = integers.sum(dtype=integers.dtype if integers.itemsize >= _WIDE else torch.int64).long()
    return sums


@torch.no_grad()
def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """By name a hash of the bits that this rank holds, in which places count, too. Waits for the device.

    One number that differs always shows, and so do numbers that changed places, but about once in 2³².
    """
    totals = {}
    for name, tensor in tensors.items():
        integers = _local_integers(tensor).reshape(-1)
        wide = torch.int64 if integers.itemsize > _WIDE else torch.int32
        odd = torch.arange(1, 2 * min(_CHUNK, len(integers)), 2, dtype=wide, device=integers.device)  # a factor a place
        total = integers.new_zeros((), dtype=torch.int64)
        # in chunks: the products of all numbers at once would need as much memory again
        for chunk in integers.split(_CHUNK):
            total = total * 31 + (chunk * odd[: len(chunk)]).sum(dtype=torch.int64)
        totals[name] = total
    return {name: int(total) for name, total in totals.items()}


BINS = 64  # of equal width, from the smallest number to the largest


class Histogram(NamedTuple):
    """How the numbers of a tensor are distributed."""

    low: float  # the smallest number
    high: float  # the largest
    counts: list[float]  # in each of BINS
    sum: float
    squares: float  # the sum of them


def compute_histograms(
    held: Mapping[str, Tensor], sizes: Mapping[str, int], factor: float, ranks: Ranks
) -> dict[str, Histogram]:
    """Collective: the histograms of whole tensors, without NaN and infinity.

    held: what this rank holds of each: a shard, all or nothing. Every number of a tensor must be held by equally many
    ranks. sizes: how many numbers each whole tensor has, with all names, the same on every rank. factor: all numbers
    are multiplied by it.
    """
    names, numbers = sorted(sizes), {name: _finite_numbers(tensor) for name, tensor in held.items()}
    low, high = _all_reduce_limits(names, numbers, ranks)
    # (tensors, BINS + 3): the bins, the sum, the sum of squares, how many numbers were held
    counted = torch.zeros(len(names), BINS + 3, dtype=torch.float64)
    for row, name in enumerate(names):
        if name in held:
            counted[row, :-1] = _count_bins(numbers[name], low[row], high[row])
            counted[row, -1] = held[name].numel()
    ranks.all_reduce_sum_(counted).wait()  # all ranks; 8 bytes a bin
    result: dict[str, Histogram] = {}
    for row, name in enumerate(names):
        # what several ranks hold was counted as often
        copies = float(counted[row, -1]) / max(sizes[name], 1)
        if copies and low[row] <= high[row]:
            *counts, total, squares = (counted[row, :-1] / copies).tolist()
            ends = low[row] * factor, high[row] * factor
            result[name] = Histogram(*ends, counts, total * factor, squares * factor**2)
    return result


def _finite_numbers(tensor: Tensor) -> Tensor:
    """The finite numbers of a tensor, flat, in a type that has room for their sum."""
    numbers = tensor.detach().float().flatten() if tensor.dtype != torch.float64 else tensor.detach().flatten()
    return numbers[numbers.isfinite()]


def _all_reduce_limits(
    names: Sequence[str], numbers: Mapping[str, Tensor], ranks: Ranks
) -> tuple[list[float], list[float]]:
    """Collective: the smallest and the largest number of each tensor, inf and -inf where there is none."""
    limits = torch.full((2, len(names)), -torch.inf, dtype=torch.float64)
    for at, name in enumerate(names):
        if name in numbers and numbers[name].numel():
            low, high = numbers[name].aminmax()
            limits[0, at], limits[1, at] = -low.double().cpu(), high.double().cpu()
    ranks.all_reduce_max_(limits).wait()  # all ranks; two numbers a tensor
    return (-limits[0]).tolist(), limits[1].tolist()


def _count_bins(numbers: Tensor, low: float, high: float) -> Tensor:
    """How many lie in each bin, their sum and that of their squares: (BINS + 2,) float64 on the CPU."""
    width = (high - low) / BINS or 1.0  # of equal numbers all lie in the first
    places = ((numbers - low) / width).long().clamp_(0, BINS - 1)
    bins = torch.bincount(places, minlength=BINS).double().cpu()
    return torch.cat([bins, torch.stack([numbers.sum(), numbers.square().sum()]).double().cpu()])
