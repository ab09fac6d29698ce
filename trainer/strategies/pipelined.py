"""Places where ranks form pipelines: which of them hold which stages of a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.parallel.mesh import described, make_mesh, ranks_along, spread
from trainer.parallel.pipeline.schedules import KINDS, Layout, Name
from trainer.parallel.ranks import Group
from trainer.refusal import Refusal
from trainer.strategies.joined import Parted


@dataclass
class Pipelined(Parted):
    """A grid of ranks along one of whose axes the stages of a network lie.

    Degrees multiply to the processes: `replicate` pipelines side by side, each of whose stages is spread over `shard`
    ranks and cut over `tensor` ranks. All ranks of one pipeline read the same data.
    """

    pipe: int | None = None  # ranks that the stages lie on; None: what the others leave
    replicate: int | None = 1  # pipelines; they average gradients. None: what the others leave
    shard: int | None = 1  # ranks that a stage's parameters are spread over (FSDP2). None: what the others leave
    tensor: int = 1  # ranks that a part is cut over, by the plan; keep them on one machine
    schedule: Name = "1F1B"  # the order in which micro-batches run
    stages_per_rank: int | None = None  # None: 1, or 2 where the schedule is made for several
    reshard_after_forward: bool = False  # where shard > 1, true: gathered anew in every micro-batch; false: in a step
    param_dtype: Literal["bf16"] | None = None  # where shard > 1: what parameters are gathered in; None: as they are
    bucket_mb: int = 25  # where shard is 1: MiB of gradients in one all-reduce
    pipeline: Group = field(init=False, repr=False)  # the ranks of this pipeline, in the order of their first stages

    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks along each axis. Refusal where they do not multiply to the processes, or make no pipeline."""
        wanted = {"pipe": self.pipe, "replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}
        degrees = spread(world_size, wanted)
        if degrees["pipe"] < 2:
            raise Refusal(f"a pipeline has 2 ranks or more, here {described(degrees)}; strategy=ddp or fsdp needs none")
        return degrees

    def layout(self, world_size: int) -> Layout:
        """Which rank holds which stages. Refusal of a number of stages that the schedule has no place for."""
        kind = KINDS[self.schedule]
        each = (2 if kind.several else 1) if self.stages_per_rank is None else self.stages_per_rank
        if each < 1 or (each > 1 and not kind.several) or (each != 2 and kind.turns_back):
            fitting = "2" if kind.turns_back else "1" if not kind.several else "1 or more"
            several = "" if kind.several else "; strategy.schedule=Interleaved1F1B takes several"
            raise Refusal(f"strategy.stages_per_rank={each}: {self.schedule} wants {fitting}{several}")
        return Layout(self.degrees(world_size)["pipe"], each, kind.turns_back)

    def _arrange(self) -> None:
        self.mesh = make_mesh(self.device.type, self.degrees(self.world.size), always=("pipe",))
        self.pipeline = Group(self.mesh.get_group("pipe"))
        self.data = ranks_along(self.mesh, "replicate", "shard")
