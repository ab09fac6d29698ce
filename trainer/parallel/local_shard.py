"""What this rank holds: of a tensor its shard or all of it, of a network parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_axes(tensor: Tensor) -> tuple[str, ...]:
    """The axes of the mesh along which ranks hold different shards of a tensor; none: each of them holds all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    # FSDP2 over tensor parallelism has a kind of its own that is_shard() denies: whatever is not replicated is split
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(axis for axis, placement in axes if not placement.is_replicate())


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
