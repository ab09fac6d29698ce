"""The orders in which torch runs a pipeline's micro-batches: where stages lie, and what each order can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Name = Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@dataclass(frozen=True)
class Kind:
    """What is particular about a schedule."""

    several: bool = True  # a rank may hold several stages
    turns_back: bool = False  # two stages a rank, down the ranks and back up: rank 0 holds the first and the last
    splits: bool = False  # gradients of inputs and of weights are computed apart
    rounds: bool = False  # micro-batches come in equal rounds of about as many as there are ranks
    full: bool = False  # as many micro-batches as stages, or more


KINDS: dict[str, Kind] = {
    "1F1B": Kind(several=False),
    "GPipe": Kind(several=False),
    "Interleaved1F1B": Kind(rounds=True),
    "LoopedBFS": Kind(),
    "InterleavedZeroBubble": Kind(splits=True, rounds=True),
    "ZBVZeroBubble": Kind(turns_back=True, splits=True),
    "DualPipeV": Kind(turns_back=True, splits=True, full=True),
}


@dataclass(frozen=True)
class Layout:
    """Which rank of a pipeline holds which stages."""

    ranks: int
    each: int  # stages a rank
    turns_back: bool = False

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.ranks * self.each

    def owner(self, stage: int) -> int:
        """The rank that holds a stage: in turn, or back up again."""
        loop, at = divmod(stage, self.ranks)
        return self.ranks - 1 - at if self.turns_back and loop % 2 else at

    def held_by(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.count) if self.owner(stage) == rank]


def takes(name: str, layout: Layout, micro_batches: int) -> bool:
    """Can this schedule run so many micro-batches? What it cannot is an error or a hang in torch."""
    kind = KINDS[name]
    if kind.full and micro_batches < layout.count:
        return False
    return not kind.rounds or micro_batches % max(1, micro_batches // layout.ranks) == 0


def runs_over_gloo(name: str) -> bool:
    """Can gloo run it? Before torch 2.13 two neighbouring stages on one rank begin with a message to themselves."""
    return not KINDS[name].turns_back or torch.__version__ >= "2.13"


def make_schedule(name: str, stages: list[Any], micro_batches: int) -> Any:
    """A schedule over this rank's stages (torch's PipelineStage), of which the last of all returns the loss itself.

    1F1B wants as many micro-batches as stages; with fewer it is the same work in GPipe's order.
    """
    from torch.distributed import pipelining  # here, because the import takes seconds

    if name == "1F1B" and micro_batches < stages[0].num_stages:
        name = "GPipe"
    make: Callable[..., Any] = getattr(pipelining, f"Schedule{name}")
    own = stages if KINDS[name].several else stages[0]
    # the last stage knows the targets and returns its loss; torch wants a function all the same
    return make(own, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
