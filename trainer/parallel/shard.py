"""Spreading parameters, gradients and optimizer state over ranks: torch's `fully_shard` (FSDP2) by units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


@dataclass(frozen=True)
class Sharding:
    """How parameters are spread and gathered."""

    reshard_after_forward: bool = True  # True: gathered anew for the backward (ZeRO-3); False: kept until then (ZeRO-2)
    param_dtype: torch.dtype | None = None  # what parameters are gathered and computed in; None: their own
    offload: bool = False  # shards, gradients and the optimizer's memory lie in the host's memory
    ahead: int = 1  # units that are gathered before they are needed


def shard(root: nn.Module, network: nn.Module, names: list[str], mesh: DeviceMesh, how: Sharding) -> FSDPModule:
    """Collective over the mesh: every parameter becomes a DTensor of which each rank holds a part, in place.

    The units of `network` that are named are gathered and released one by one, the rest of it with `root`, the module
    that is called. mesh: one axis ("shard"), or two ("replicate", "shard"). Names stay.
    """
    policy = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=torch.float32 if how.param_dtype else None)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.offload else OffloadPolicy()
    spread = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    again = how.reshard_after_forward
    units = [spread(network.get_submodule(name), reshard_after_forward=again) for name in names]
    # what is left is small and wanted first in the backward: it stays gathered, unless it is everything
    whole = spread(root, reshard_after_forward=again and not units)
    if how.ahead > 1:
        for at, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + how.ahead])
            unit.set_modules_to_backward_prefetch(units[max(at - how.ahead, 0) : at][::-1])
    return whole


def reshard(root: nn.Module) -> None:
    """Release what was gathered: parameters are again the parts that this rank holds."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
