"""The global gradient norm and clipping, for networks with whole tensors, sharded tensors, or both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.nn.utils import get_total_norm

from trainer.parallel.device_mesh import ranks_along, split_axes, to_local

# numbers whose squares torch may add up in one chain
CHAIN = 4096


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Collective: the 2-norm over all gradients, the same bits on every rank; what ranks hold in common counts once.

    torch's own clipping refuses networks that mix tensors and DTensors (pytorch/pytorch#121020, #180346), hence this.
    """
    whole = [gradient for gradient in gradients if not split_axes(gradient)]
    if len(whole) == len(gradients):
        return _norm([to_local(gradient) for gradient in whole])
    # shards that are added up over the same ranks: (mesh, axes) → what this rank holds
    alike: dict[tuple[DeviceMesh, tuple[str, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor) and (axes := split_axes(gradient)):
            alike.setdefault((gradient.device_mesh, axes), []).append(to_local(gradient))
    # squares add up over shards and over tensors, norms do not; what every rank holds counts once
    squares = [_norm([to_local(gradient) for gradient in whole]).square()] if whole else []
    for (mesh, axes), shards in alike.items():
        square = _norm(shards).square()
        # each copy of the network adds up its own shards: copies whose norms differed in one bit would drift apart
        for axis in axes:
            square = ranks_along(mesh, axis).sum_in_order(square)  # the axis's ranks, each with its shard
        squares.append(square)
    if len({square.device for square in squares}) > 1:  # some were offloaded: the optimizer needs the norm there
        squares = [square.to("cpu") for square in squares]
    return torch.stack(squares).sum().sqrt()


def _norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm over tensors of this rank, as exact as their dtype.

    On a CPU torch adds up a tensor's squares in one chain, which loses three of seven digits over five million numbers:
    a whole network and its shards would then report two norms, and clip by two factors.
    """
    return get_total_norm([part for tensor in tensors for part in _short_chains(tensor)])


def _short_chains(tensor: Tensor) -> list[Tensor]:
    """Tensors of the same 2-norm: norms of rows of CHAIN numbers, and the rest; itself where it is short."""
    if tensor.is_sparse:  # torch 2.11 has no norm of these
        tensor = tensor.coalesce().values()
    if tensor.device.type != "cpu" or tensor.numel() <= CHAIN:
        return [tensor]
    flat = tensor.reshape(-1)  # a copy only where the memory has gaps or another order
    rest = flat.numel() % CHAIN
    return [torch.linalg.vector_norm(flat[rest:].view(-1, CHAIN), dim=1), flat[:rest]]


def clip_gradients_(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their global norm is at most max_norm; no device waits."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiply_gradients_(gradients, factor)


def multiply_gradients_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply what this rank holds of each gradient, in place, by one number that stays on the device.

    Gradients that were offloaded to the host meet it there: it is copied once, and waited for.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for local in map(to_local, gradients):
        by_device.setdefault(local.device, []).append(local)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device))
