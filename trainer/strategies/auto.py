"""The strategy that needs no thought: one process is `single`, several are `ddp`; nothing cleverer."""

from __future__ import annotations

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.strategies.place import Recomputed
from trainer.strategies.single import Single


def auto(machine: Machine, sync_bn: bool = False, activation_checkpointing: Recomputed = "none") -> Strategy:
    """Choose by the number of processes alone."""
    kind = Single if machine.launch.world_size == 1 else DDP
    return kind(sync_bn=sync_bn, activation_checkpointing=activation_checkpointing, machine=machine)
