"""Pipeline parallelism: a network is cut into stages on different ranks, and micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from trainer.data.sampler import RankSampler
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.parallel.device_mesh import format_degrees, ranks_along
from trainer.parallel.fully_shard import Sharding
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.schedule import SCHEDULES, ScheduleName, StageLayout, can_run, runs_over_gloo
from trainer.parallel.ranks import Ranks
from trainer.strategies.loss import TaskNetwork
from trainer.strategies.multi_process import Meshed
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.pipeline_model import PipelineModel


@dataclass
class PP(Meshed):
    """Each rank of a pipeline holds some stages of the network; a step's micro-batches flow through all of them.

    Degrees multiply to the processes: `replicate` pipelines side by side, each of whose stages is spread over `shard`
    ranks and split over `tensor` ranks. All ranks of one pipeline read the same data. Orders of micro-batches:
    torch.distributed.pipelining.
    """

    axis: ClassVar[str] = "pipe"
    narrowing: ClassVar[tuple[str, ...]] = ("param_dtype",)
    pipe: int | None = None  # ranks that the stages lie on; None: what the others leave
    replicate: int | None = 1  # pipelines; they average gradients. None: what the others leave
    shard: int | None = 1  # ranks that a stage's parameters are spread over (FSDP2). None: what the others leave
    tensor: int = 1  # ranks that a layer is split over, by the plan; keep them on one machine
    schedule: ScheduleName = "1F1B"  # the order in which micro-batches run
    stages_per_rank: int | None = None  # None: 1, or 2 where the schedule is made for several
    reshard_after_forward: bool = False  # where shard > 1, true: gathered anew in every micro-batch; false: in a step
    param_dtype: Literal["bf16"] | None = None  # where shard > 1: what parameters are gathered in; None: as they are

    @property
    @override
    def name(self) -> str:
        data = "fsdp_" if self.shard != 1 else "ddp_" if self.replicate != 1 else ""
        return f"{data}pp" + ("_tp" if self.tensor > 1 else "")

    @override
    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks there are along each axis. Refusal also if they make no pipeline."""
        degrees = super().degrees(world_size)
        if degrees["pipe"] < 2:
            raise Refusal(
                f"a pipeline has 2 ranks or more, here {format_degrees(degrees)}; start 2 processes or more, or use"
                " strategy=ddp or fsdp"
            )
        return degrees

    @property
    @override
    def counting_groups(self) -> list[Ranks]:
        """Also the stages of a pipeline, which count different layers."""
        return [*super().counting_groups, ranks_along(self.mesh, "pipe")]

    @property
    @override
    def slice(self) -> RankSampler:
        """As the base; but torch's schedules need one shape for all micro-batches of a step."""
        return replace(super().slice, same_shape=True)

    def layout(self, world_size: int) -> StageLayout:
        """Which rank holds which stages. Refusal of a number of stages that the schedule cannot run."""
        kind = SCHEDULES[self.schedule]
        each = (2 if kind.multi_stage else 1) if self.stages_per_rank is None else self.stages_per_rank
        if each < 1 or (each > 1 and not kind.multi_stage) or (each != 2 and kind.v_shaped):
            fitting = "2" if kind.v_shaped else "1" if not kind.multi_stage else "1 or more"
            several = "" if kind.multi_stage else "; strategy.schedule=Interleaved1F1B takes several"
            raise Refusal(f"strategy.stages_per_rank={each}: {self.schedule} wants {fitting}{several}")
        return StageLayout(self.degrees(world_size)["pipe"], each, kind.v_shaped)

    @override
    def refuse_compile(self) -> None:
        """Refuse also CUDA graphs: one micro-batch would write over what others still need."""
        super().refuse_compile()
        if self.machine.compile is not None and self.machine.compile.mode in ("reduce-overhead", "max-autotune"):
            raise Refusal(
                f"strategy={self.name} compile.mode={self.machine.compile.mode}: CUDA graphs keep one micro-batch, and"
                " a pipeline has several under way; use compile.mode=default"
            )

    @override
    def refuse_shares(self, world_size: int, share: int, micro_batches: int, uneven: bool) -> None:
        """Refuse unequal micro-batches, and a number of them that the schedule cannot run: torch would hang or fail."""
        if uneven:
            raise Refusal("loop.uneven=true: a pipeline's micro-batches are of one size; strategy=ddp or fsdp takes it")
        layout = self.layout(world_size)
        if not can_run(self.schedule, layout, micro_batches):
            fitting = [n for n in range(1, share + 1) if share % n == 0 and can_run(self.schedule, layout, n)]
            nearest = sorted(fitting, key=lambda n: abs(n - micro_batches))[:2]
            suggestion = f"nearest: loop.micro_batches={' or '.join(map(str, sorted(nearest)))}; " if nearest else ""
            raise Refusal(
                f"{self.schedule} cannot run {micro_batches} micro-batches over {layout.count} stages on {layout.ranks}"
                f" ranks; {suggestion}GPipe and 1F1B take any number"
            )

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse fields that do not go together."""
        self._refuse_fields(world_size)
        self._refuse_backend()
        super().check(task, network, world_size)

    @override
    def refuse_forward(self, task: Task, network: nn.Module, world_size: int, example: Callable[[], Any]) -> None:
        """Refuse a network that cannot be cut into so many stages."""
        step, cuts, count = TaskNetwork(task, network), task.plan(network).cuts, self.layout(world_size).count
        cut_stages(step, cuts, count, example(), held=(), may_draw=self.dropout == "sample")

    @override
    def notes(self, network: nn.Module) -> list[str]:
        mesh, *others = super().notes(network)
        return [f"{mesh}; {self.layout(self.world.size).count} stages, {self.schedule}", *others]

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        sharding = Sharding(self.reshard_after_forward, self.param_dtype)
        return PipelineModel(self, task, network, example, self.layout(self.world.size), self.schedule, sharding)

    def _refuse_backend(self) -> None:
        """Refuse gloo where it cannot send what must be sent."""
        if self.machine.on_gpu and self.machine.backend == "gloo":
            raise Refusal(
                "distributed.backend=gloo cannot send a GPU's tensors to another rank, which pipelines do; use nccl"
            )
        if not self.machine.on_gpu and not runs_over_gloo(self.schedule):
            raise Refusal(
                f"{self.schedule} on CPUs wants torch 2.13 or later, this is {torch.__version__}; 1F1B, GPipe and the"
                " interleaved ones do not"
            )

    def _refuse_fields(self, world_size: int) -> None:
        """Refuse fields that do not go together."""
        splits = SCHEDULES[self.schedule].splits_backward  # into gradients of inputs and of weights
        if self.machine.compile and splits:
            raise Refusal(
                f"compile.mode={self.machine.compile.mode}: {self.schedule} computes gradients of inputs and weights"
                " apart, which compiled stages cannot; 1F1B, GPipe, Interleaved1F1B and LoopedBFS can"
            )
        if self.activation_checkpointing == "operators" and splits:
            raise Refusal(
                f"strategy.activation_checkpointing=operators: {self.schedule} runs two backwards, of which torch's"
                " selective recomputing allows one; use units, or another schedule"
            )
        if self.reshard_after_forward and splits:
            raise Refusal(
                f"strategy.reshard_after_forward=true: {self.schedule} computes gradients of weights later, from what"
                " would have been released (torch then trains wrongly, without a word); use false, or another schedule"
            )
        if self.param_dtype and self.degrees(world_size)["shard"] == 1:
            raise Refusal(
                f"strategy.param_dtype={self.param_dtype} is for strategy.shard > 1; precision=bf16 needs none"
            )
