"""The bits of a tensor as one number: where two copies hold the same bits, their numbers are equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.local_shard import held

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of as many bytes
_CHUNK = 2**20  # numbers
_WIDE = 4  # bytes of numbers that are added up in their own type: in a wider one it takes four times as long


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name the sum of what this rank holds of each, read as whole numbers: 0-d int64, where it lies.

    Sums wrap. One bit that differs always shows; several cancel each other out about once in 2³².
    """
    sums = {}
    for name, tensor in tensors.items():
        own = held(tensor)
        own = torch.view_as_real(own) if own.is_complex() else own
        whole = _WHOLE[own.itemsize]
        sums[name] = own.view(whole).sum(dtype=whole if own.itemsize >= _WIDE else torch.int64).long()
    return sums


@torch.no_grad()
def prints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """By name what the bits that this rank holds of each come to, where they stand counts, too. Waits for the device.

    One number that differs always shows, and so do numbers that changed places, but about once in 2³².
    """
    found = {}
    for name, tensor in tensors.items():
        own = held(tensor).detach()
        own = torch.view_as_real(own) if own.is_complex() else own
        whole = own.reshape(-1).view(_WHOLE[own.itemsize])
        wide = torch.int64 if own.itemsize > _WIDE else torch.int32
        odd = torch.arange(1, 2 * min(_CHUNK, len(whole)), 2, dtype=wide, device=whole.device)
        total = whole.new_zeros((), dtype=torch.int64)
        # in chunks: the products of all numbers at once would need as much memory again
        for chunk in whole.split(_CHUNK):
            total = total * 31 + (chunk * odd[: len(chunk)]).sum(dtype=torch.int64)
        found[name] = total
    return {name: int(total) for name, total in found.items()}
