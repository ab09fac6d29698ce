"""Averaging gradients over the ranks that hold the same parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.parallel.ranks import Ranks, Waitable


def average_gradients(parameters: list[nn.Parameter], ranks: Ranks, bucket_bytes: int) -> None:
    """Collective: every parameter's gradient becomes its mean over the ranks that hold the same part of it.

    Once a step, whatever the number of micro-batches. A gradient that only some ranks have counts as zero on others.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if ranks.size == 1 or not trainable:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8)
    ranks.all_reduce_max_(present).wait()  # a byte a parameter: did any of these ranks use it?
    used = [parameter for parameter, some in zip(trainable, present.tolist(), strict=True) if some]
    # of what any rank has used all must send something, and of what none has used nobody
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in used if parameter.grad is not None]
    average([g.to_local() if isinstance(g, DTensor) else g for g in gradients], ranks, bucket_bytes)


def average(gradients: list[Tensor], ranks: Ranks, bucket_bytes: int) -> None:
    """Collective: every gradient becomes its mean over the ranks, in place. All buckets are under way at once.

    gradients: what this rank holds of each (local tensors), the same shapes in the same order on all of these ranks.
    """
    if ranks.size == 1:
        return
    under_way: list[tuple[list[Tensor], Tensor, Waitable]] = []
    for bucket in buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        under_way.append((bucket, flat, ranks.all_reduce_sum_(flat)))  # the given ranks; every gradient travels once
    for bucket, flat, work in under_way:
        work.wait()
        flat /= ranks.size
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def buckets(gradients: list[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Neighbours of one type on one device, up to so many bytes each."""
    full: list[list[Tensor]] = []
    size, kind = 0, None
    for gradient in gradients:
        if kind != (gradient.dtype, gradient.device) or size + gradient.nbytes > bucket_bytes:
            full.append([])
            size, kind = 0, (gradient.dtype, gradient.device)
        full[-1].append(gradient)
        size += gradient.nbytes
    return full
