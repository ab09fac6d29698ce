"""A few numbers that stand for a tensor, or for a sample's part of one.

Projections on random signs and a norm, all of what is finite; and a number that says where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.rng import GOLDEN, mix_bits, to_int64

_BLOCK = 2**16  # numbers that one row of signs is for
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie as evenly as can be
# One projection of a small difference may be near zero by chance. The mean square of eight is the square of its norm
# within a factor of five, but for one in a hundred thousand.
_PROJECTIONS = 8
FIRST, LENGTH, PATTERN, WIDTH = 0, 1, 2, 2 + _PROJECTIONS  # columns; the other projections follow


def signatures(rows: Tensor, first: int = 0) -> Tensor:
    """The signatures of each row: (n, numbers) → (n, 10) float64 on the CPU: a projection on ±1, the 2-norm, a pattern.

    first: where in longer rows these are stretches of they begin; the other stretches' signatures are `joined` to them.

    After them seven projections more. A change of a row by a vector d moves projections and norm by about the norm of
    d, wherever in the row it is. The pattern is 0 where all numbers are finite, else a whole number that says which are
    infinite or NaN, and where.
    """
    x, first = (torch.view_as_real(rows).flatten(1), 2 * first) if rows.is_complex() else (rows, first)
    x = x.detach().to(torch.float64)
    norm = x.norm(dim=1)
    pattern = torch.zeros_like(norm)
    if not norm.isfinite().all():  # a mask of -inf: what is equal is equal, and the others have digits of their own
        # float64 adds whole numbers of this size exactly, in any order
        kinds = x.isposinf() + 2.0 * x.isneginf() + 3.0 * x.isnan()
        pattern = (kinds * (mix_bits(torch.arange(x.shape[1]) + first + 1) & 0xFFFFF).to(x)).sum(1)
        x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        norm = x.norm(dim=1)
    signs, projections = _signs(x.device), x.new_zeros(len(x), _PROJECTIONS)
    for begin in range(first - first % _BLOCK, first + x.shape[1], _BLOCK):
        block = x[:, max(0, begin - first) : begin + _BLOCK - first]
        of_block = signs[max(0, first - begin) :][: block.shape[1]]
        # no two blocks weigh the same, or they could be exchanged unseen
        projections += (block @ of_block) * (1 + begin // _BLOCK * _GOLDEN % 1)
    own = [projections[:, :1], norm[:, None], pattern[:, None], projections[:, 1:]]
    return torch.cat(own, dim=1).cpu()


def moved(one: Tensor, other: Tensor) -> Tensor:
    """How far rows lie apart, by their signatures: (n, 10), (n, 10) → (n,): about the norm of the difference."""
    change = (one - other).abs()
    projections = torch.cat([change[:, :LENGTH], change[:, PATTERN + 1 :]], dim=1)
    return torch.maximum(projections.square().mean(1).sqrt(), change[:, LENGTH])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The signatures of what these are the signatures of parts of, each with zeros in the place of the others."""
    every = torch.stack([*parts])
    sums = every.sum(0)
    sums[:, LENGTH] = every[:, :, LENGTH].norm(dim=0)
    return sums


def whole(tensor: Tensor) -> Tensor:
    """Collective where ranks hold shards of it: all of a tensor. It is no layout that torch calculates with lazily."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # the ranks of its mesh; its shards to all
    return full.detach().to_dense() if full.layout != torch.strided else full.detach()


@cache
def _signs(device: torch.device) -> Tensor:
    words = mix_bits(torch.arange(1, _BLOCK + 1) * to_int64(GOLDEN))
    bits = words[:, None] >> torch.arange(_PROJECTIONS)  # (block, projections)
    return ((bits & 1) * 2 - 1).to(device, torch.float64)
