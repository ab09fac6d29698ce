"""What a network says about being split over devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Plan:
    """How a network can be split: by tensors, by shard units, by pipeline stages. An empty part means "as you see fit".

    All names are module names of the network; `*` stands for one level, as in `torch.distributed.tensor.parallel`.
    """

    tensor: dict[str, ParallelStyle] = field(default_factory=dict)  # module name → how its parameters are split
    # what is split as wholes: {"heads": 12}; each degree divides it
    divisible: dict[str, int] = field(default_factory=dict)
    shard: tuple[str, ...] = ()  # subtrees that are gathered and released together; empty: by size
    cuts: tuple[str, ...] = ()  # first module of each pipeline stage after the first; empty: equal parts
