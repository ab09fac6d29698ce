"""From a network without values to one that holds this rank's part of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.deferred import materialise, ties


@torch.no_grad()
def fill(network: nn.Module, built: nn.Module, device: torch.device, parts: torch.device) -> None:
    """Give a network that was built on the meta device its values, of each tensor the part that this rank holds.

    `built`: the network as it was constructed; `network`: what has become of it, with the same names or fewer. The
    values are those of an ordinary construction; no more than one tensor is whole at any time, and nothing travels.
    """
    make_room(network, device, parts)
    own = dict(chain(network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False)))
    tied: dict[str, list[str]] = {}  # a rank may hold a tied tensor under its second name alone
    for other, first in ties(built).items():
        tied.setdefault(first, []).append(other)

    def take(name: str, value: Tensor) -> None:
        for one in {id(own[name]): own[name] for name in (name, *tied.get(name, ())) if name in own}.values():
            copy_part(one, value)

    materialise(built, take)


def make_room(network: nn.Module, device: torch.device, parts: torch.device) -> None:
    """Replace what is on the meta device by memory without values; what was one tensor under two names stays one.

    parts: where DTensors lie; the rest lies on the device.
    """
    made: dict[int, Tensor] = {}
    for module in network.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not tensor.is_meta:
                continue
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device=parts if isinstance(tensor, DTensor) else device)
                made[id(tensor)] = (
                    nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                )
            setattr(module, name, made[id(tensor)])


def copy_part(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor, into a DTensor the part that this rank holds."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value)
        return
    part, mesh = value.to(tensor.dtype), tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    # tensor ranks cut first, then FSDP2 cuts what they have, although its axis is the outer one
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis] != "tensor"):
        placement: Any = tensor.placements[axis]  # FSDP2's own kind over tensor parallelism is not torch's Shard
        if placement.is_replicate():
            continue
        parts = torch.chunk(part, mesh.size(axis), placement.dim)
        at = mesh.get_local_rank(axis)
        part = parts[at] if at < len(parts) else part.narrow(placement.dim, 0, 0)
    tensor.to_local().copy_(part)
