"""Mistakes that fp64 does not show: they are made only where a run computes in its own precision.

Each is a patch of the program by name: (what is changed, what it becomes).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.buckets import pack
from trainer.strategies.ddp import COMPRESSION
from trainer.strategies.ddp import DDPModel as PlacedDDP

_wrap = PlacedDDP.wrap


def own_scale(self: Any, loss: Tensor) -> Tensor:
    """One rank multiplies its losses by another scale than the others."""
    return loss * (self._scale / self._ranks) * (1 + dist.get_rank() if dist.is_initialized() else 1)


def own_unscale(self: Any, parameters: list[Tensor]) -> None:
    """One rank divides its gradients by another scale than the others."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(self._ranks / self._scale * (1 + dist.get_rank() if dist.is_initialized() else 1))


def narrow_hook(self: Any) -> Any:
    """Gradients of fp32 travel in bf16, and no key says so."""
    forward = _wrap(self)
    if self.machine.resolved_precision == "fp32":
        self._replica.register_comm_hook(self.strategy.world.group, COMPRESSION["bf16"])
    return forward


def narrow_buckets(tensors: Any) -> Tensor:
    """The same, in what a strategy packs by itself."""
    flat = pack(tensors)
    return flat.to(torch.bfloat16).to(flat.dtype) if flat.dtype == torch.float32 else flat


# name → precision, strategy, what is changed, where it is found
PLANTED: dict[str, tuple[str, str, str, Any, str]] = {
    "own_scale": ("fp16", "ddp", "trainer.strategies.loss_scaler.Scaler.scale", own_scale, "step 1, gradient, "),
    "own_unscale": ("fp16", "ddp", "trainer.strategies.loss_scaler.Scaler.unscale_", own_unscale, "step 1, norm, norm"),
    "narrow_hook": ("fp32", "ddp", "trainer.strategies.ddp.DDPModel.wrap", narrow_hook, "step 1, gradient, "),
    "narrow_buckets": (
        "fp32",
        "zero1",
        "trainer.parallel.parameter_owners.pack",
        narrow_buckets,
        "step 1, gradient, ",
    ),
}
