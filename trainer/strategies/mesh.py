"""Degrees instead of a name: the strategy that has them."""

from __future__ import annotations

from typing import Literal

from trainer.parallel.pipeline.schedules import Name
from trainer.strategies.base import Strategy
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.pipeline import PP
from trainer.strategies.place import Recomputed


def mesh(
    machine: Machine,
    pipe: int = 1,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    schedule: Name = "1F1B",
    param_dtype: Literal["bf16"] | None = None,
    sync_bn: bool = False,
    activation_checkpointing: Recomputed = "none",
) -> Strategy:
    """Stages where there is more than one, else parameters spread over replicate × shard, cut over tensor.

    What else these strategies can be told stands in their own files (`strategy=pp`, `strategy=fsdp`).
    """
    if pipe == 1:
        return FSDP(sync_bn, activation_checkpointing, machine, replicate, shard, tensor, param_dtype=param_dtype)
    return PP(
        sync_bn, activation_checkpointing, machine, pipe, replicate, shard, tensor, schedule, param_dtype=param_dtype
    )
