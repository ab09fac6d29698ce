"""`auto`: the strategy that suits the number of processes."""

from __future__ import annotations

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.strategies.rank_context import ActivationCheckpointing
from trainer.strategies.single import Single


def auto(
    machine: Machine,
    sync_bn: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    activation_offload: bool = False,
) -> Strategy:
    """One process is `single`; several are `ddp`, unless a plan has named another strategy in place of `auto`."""
    kind = Single if machine.launch.world_size == 1 else DDP
    return kind(
        sync_bn=sync_bn,
        activation_checkpointing=activation_checkpointing,
        activation_offload=activation_offload,
        machine=machine,
    )
