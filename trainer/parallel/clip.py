"""The true global gradient norm, and clipping to it, for tensors that are whole, cut, or both in one network."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.nn.utils import get_total_norm


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Collective: the 2-norm over all gradients, the same on every rank; a replicated part is counted once.

    torch's own clipping refuses networks that mix tensors and DTensors (pytorch/pytorch#121020, #180346), hence this.
    """
    whole: list[Tensor] = []
    cut: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        axes = _cut_axes(gradient)
        local = _local(gradient)
        if axes is None:
            whole.append(local)
        else:
            cut.setdefault(axes, []).append(local)
    if not cut:
        return get_total_norm(whole)
    # squares add up over shards and over tensors, norms do not; what every rank holds counts once
    squares = [get_total_norm(whole).square()] if whole else []
    for (mesh, axes_of_mesh), locals_ in cut.items():
        part = get_total_norm(locals_).square()
        for axis in axes_of_mesh:
            dist.all_reduce(
                part, group=mesh.get_group(axis)
            )  # the axis's ranks, each with its shard; one number travels
        squares.append(part)
    if len({square.device for square in squares}) > 1:  # some were offloaded: the optimizer needs the norm there
        squares = [square.to("cpu") for square in squares]
    return torch.stack(squares).sum().sqrt()


def clip_(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their global norm is at most max_norm; no device waits."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiply_(gradients, factor)


def multiply_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply what this rank holds of each gradient, in place, by one number that stays on the device.

    Gradients that were offloaded to the host meet it there: it is copied once, and waited for.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for local in map(_local, gradients):
        by_device.setdefault(local.device, []).append(local)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _cut_axes(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Along which mesh axes a gradient is cut; None: every rank holds all of it."""
    if not isinstance(gradient, DTensor):
        return None
    # FSDP2 over tensor parallelism has a kind of its own that is_shard() denies: whatever is not replicated is cut
    axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, axes) if axes else None
