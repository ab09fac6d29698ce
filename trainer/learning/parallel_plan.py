"""`Plan`: how a network can be divided over devices. A network or a task gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Plan:
    """How a network can be divided: into tensor shards, shard units, pipeline stages, by sequence.

    An empty field means: automatic; of `tensor` and `context`: not at all.

    All names are module names of the network; `*` matches one level, as in `torch.distributed.tensor.parallel`.
    """

    tensor: dict[str, ParallelStyle] = field(default_factory=dict)  # module name → how it is split over tensor ranks
    # numbers that the number of tensor ranks must divide: {"heads": 12}
    divisible: dict[str, int] = field(default_factory=dict)
    shard: tuple[str, ...] = ()  # units: subtrees that are gathered together; empty: by size
    cuts: tuple[str, ...] = ()  # first module of each pipeline stage after the first; empty: equal stages
    # module name → how it works on a stretch of each sequence: trainer.GatheredKeys, ShiftedPlaces
    context: dict[str, ParallelStyle] = field(default_factory=dict)
    # modules that `strategy.expert` spreads: the first dimension of their parameters are experts, and their method
    # compute(rows, chosen) gets rows in the order of their experts, and the experts' numbers in any order
    experts: tuple[str, ...] = ()
    # integer buffers in which forwards of a step count, by name: before `after_step` they hold the sum over the global
    # batch, and their module's `counted()` is called
    counters: tuple[str, ...] = ()
