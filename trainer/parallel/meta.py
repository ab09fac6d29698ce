"""From a network without values to one that holds this rank's part of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.deferred import materialise


@torch.no_grad()
def fill(network: nn.Module, built: nn.Module, device: torch.device) -> None:
    """Give a network that was built on the meta device its values, of each tensor the part that this rank holds.

    `built`: the network as it was constructed; `network`: what has become of it, with the same names or fewer. The
    values are those of an ordinary construction; no more than one tensor is whole at any time, and nothing travels.
    """
    network.to_empty(device=device)
    own = dict(chain(network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False)))

    def take(name: str, value: Tensor) -> None:
        if name in own:
            copy_part(own[name], value)

    materialise(built, take)


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
