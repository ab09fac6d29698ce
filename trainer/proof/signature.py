"""Three numbers that stand for a tensor, or for a sample's part of one.

A projection on random signs and a norm, both of what is finite; and a number that says where the others are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.seeds import GOLDEN, mixed, signed

_BLOCK = 2**16  # numbers that one row of signs is for
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie as evenly as can be


def signatures(rows: Tensor) -> Tensor:
    """The signatures of each row: (n, numbers) → (n, 3) float64 on the CPU: a projection on ±1, the 2-norm, a pattern.

    A change of a row by a vector d moves each of the first two by about the norm of d, wherever in the row it is. The
    pattern is 0 where all numbers are finite, else a whole number that says which are infinite or NaN, and where.
    """
    x = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    x = x.detach().to(torch.float64)
    norm = x.norm(dim=1)
    pattern = torch.zeros_like(norm)
    if not norm.isfinite().all():  # a mask of -inf: what is equal is equal, and the others have digits of their own
        # float64 adds whole numbers of this size exactly, in any order
        kinds = x.isposinf() + 2.0 * x.isneginf() + 3.0 * x.isnan()
        pattern = (kinds * (mixed(torch.arange(x.shape[1]) + 1) & 0xFFFFF).to(x)).sum(1)
        x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        norm = x.norm(dim=1)
    signs, projection = _signs(x.device), x.new_zeros(len(x))
    for at, block in enumerate(x.split(_BLOCK, dim=1)):
        # no two blocks weigh the same, or they could be exchanged unseen
        projection += (block @ signs[: block.shape[1]]) * (1 + at * _GOLDEN % 1)
    return torch.stack([projection, norm, pattern], dim=1).cpu()


def whole(tensor: Tensor) -> Tensor:
    """Collective where ranks hold shards of it: all of a tensor. It is no layout that torch calculates with lazily."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # the ranks of its mesh; its shards to all
    return full.detach().to_dense() if full.layout != torch.strided else full.detach()


@cache
def _signs(device: torch.device) -> Tensor:
    words = mixed(torch.arange(1, _BLOCK + 1) * signed(GOLDEN))
    return ((words & 1) * 2 - 1).to(device, torch.float64)
