"""The strategies that a run could have on so many processes, each as a user would ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.pp import PP
from trainer.strategies.single import Single
from trainer.strategies.tp import TP
from trainer.strategies.zero1 import Zero1

TRIED_DEGREES = (2, 4, 8)  # of tensor, context and pipeline parallelism, beside all processes of a machine
MAX_STAGES = 8  # of a pipeline, where nothing but it is used


class Candidate(NamedTuple):
    """A strategy, and the arguments that choose it."""

    arguments: str  # of the command line
    strategy: Strategy
    micro_batches: int = 1  # a pipeline needs several, or its stages wait for each other

    @property
    def name(self) -> str:
        """The option of the group `strategy`."""
        return self.arguments.partition(" ")[0].removeprefix("strategy=") or self.strategy.name


def candidates(like: Strategy, machine: Machine, per_machine: int) -> Iterator[Candidate]:
    """Every strategy with the degrees that make sense, simple ones first.

    like: what they all have in common is this strategy's. machine: its launch says how many processes there are.
    per_machine: processes of one machine, within which layers and sequences are divided.
    """
    size = machine.launch.world_size  # processes, of all machines
    common: dict[str, Any] = {
        "machine": machine,
        "sync_bn": like.sync_bn,
        "activation_checkpointing": like.activation_checkpointing,
        "activation_offload": like.activation_offload,
    }
    if size == 1:
        yield Candidate("strategy=single", Single(**common))
        return
    yield Candidate("strategy=ddp", DDP(**common))
    yield Candidate("strategy=fsdp", FSDP(**common))
    yield Candidate("strategy=zero1", Zero1(**common))
    kept = FSDP(**common, reshard_after_forward=False)
    yield Candidate("strategy=fsdp strategy.reshard_after_forward=false", kept)
    # weights are gathered inside a machine, or inside a half of one
    copies = size // per_machine if size > per_machine else 2
    if size % copies == 0 and copies < size:
        hybrid = FSDP(**common, replicate=copies)
        yield Candidate(f"strategy=hsdp strategy.replicate={copies}", hybrid)
    yield from _divided(common, size, per_machine)
    yield from _pipelines(common, size)


def _divided(common: dict[str, Any], size: int, per_machine: int) -> Iterator[Candidate]:
    """Layers or sequences over the neighbours of a machine; with copies or shards where there are more processes."""
    if size <= per_machine:
        # all processes of one machine, without copies
        yield Candidate("strategy=tp", TP(**common))
        yield Candidate("strategy=cp", TP(**common, context=None, tensor=1))
    for degree in TRIED_DEGREES:
        if degree < size and degree <= per_machine and size % degree == 0:
            tensor, context = f"strategy.tensor={degree}", f"strategy.context={degree}"
            copied, sharded = TP(**common, replicate=None, tensor=degree), FSDP(**common, tensor=degree)
            yield Candidate(f"strategy=ddp_tp {tensor}", copied)
            yield Candidate(f"strategy=fsdp_tp {tensor}", sharded)
            copied = TP(**common, replicate=None, context=degree, tensor=1)
            yield Candidate(f"strategy=ddp_cp {context}", copied)
            sharded = FSDP(**common, context=degree)
            yield Candidate(f"strategy=fsdp_cp {context}", sharded)


def _pipelines(common: dict[str, Any], size: int) -> Iterator[Candidate]:
    """Stages over all processes, or over a few, with copies or shards of them."""
    if size <= MAX_STAGES:
        yield Candidate("strategy=pp", PP(**common), size)
    for pipe in TRIED_DEGREES:
        if pipe < size and size % pipe == 0:
            degree = f"strategy.pipe={pipe}"
            yield Candidate(f"strategy=ddp_pp {degree}", PP(**common, pipe=pipe, replicate=None), pipe)
            yield Candidate(f"strategy=fsdp_pp {degree}", PP(**common, pipe=pipe, shard=None), pipe)
