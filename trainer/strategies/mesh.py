"""`mesh`: the strategy of so many stages, copies, shards, stretches of a sequence, tensor ranks, and expert ranks."""

from __future__ import annotations

from functools import partial
from typing import Literal

from trainer.messages import Refusal
from trainer.parallel.pipeline.schedule import ScheduleName
from trainer.strategies.base import Strategy
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.pp import PP
from trainer.strategies.rank_context import ActivationCheckpointing


def mesh(
    machine: Machine,
    pipe: int = 1,
    replicate: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    schedule: ScheduleName = "1F1B",
    param_dtype: Literal["bf16"] | None = None,
    sync_bn: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    activation_offload: bool = False,
) -> Strategy:
    """`PP` if there is more than one stage, else `FSDP` over replicate × shard × context × tensor ranks.

    These strategies have more fields: `strategy=pp`, `strategy=fsdp`.
    """
    if pipe > 1 and context > 1:
        raise Refusal(
            f"strategy.pipe={pipe} and strategy.context={context}: the stages of a pipeline take whole sequences;"
            " strategy.pipe=1 with strategy.shard or strategy.tensor, or strategy.context=1"
        )
    if pipe > 1 and expert > 1:
        raise Refusal(
            f"strategy.pipe={pipe} and strategy.expert={expert}: the stages of a pipeline keep all experts of their"
            " blocks; strategy.pipe=1, or strategy.expert=1"
        )
    make = partial(FSDP, context=context, expert=expert) if pipe == 1 else partial(PP, pipe=pipe, schedule=schedule)
    return make(
        machine=machine,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        param_dtype=param_dtype,
        sync_bn=sync_bn,
        activation_checkpointing=activation_checkpointing,
        activation_offload=activation_offload,
    )
