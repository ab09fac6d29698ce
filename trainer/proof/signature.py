"""Two numbers that stand for a tensor, or for a sample's part of one: a projection on random signs, and a norm."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.seeds import GOLDEN, mixed, signed

_BLOCK = 2**16  # numbers that one row of signs is for
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie as evenly as can be


def signatures(rows: Tensor) -> Tensor:
    """The signatures of each row: (n, numbers) → (n, 2) float64 on the CPU, a projection on ±1 and the 2-norm.

    A change of a row by a vector d moves each of the two by about the norm of d, wherever in the row it is.
    """
    x = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    x = x.detach().to(torch.float64)
    signs, projection = _signs(x.device), x.new_zeros(len(x))
    for at, block in enumerate(x.split(_BLOCK, dim=1)):
        # no two blocks weigh the same, or they could be exchanged unseen
        projection += (block @ signs[: block.shape[1]]) * (1 + at * _GOLDEN % 1)
    return torch.stack([projection, x.norm(dim=1)], dim=1).cpu()


def whole(tensor: Tensor) -> Tensor:
    """Collective where ranks hold shards of it: all of a tensor. It is no layout that torch calculates with lazily."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # the ranks of its mesh; its shards to all
    return full.detach().to_dense() if full.layout != torch.strided else full.detach()


@cache
def _signs(device: torch.device) -> Tensor:
    words = mixed(torch.arange(1, _BLOCK + 1) * signed(GOLDEN))
    return ((words & 1) * 2 - 1).to(device, torch.float64)
