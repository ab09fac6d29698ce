"""A network cut into stages that lie on different ranks; micro-batches flow through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.learning.task import Task
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.schedules import KINDS, runs_over_gloo, takes
from trainer.parallel.tensor import refuse_plan
from trainer.refusal import Refusal
from trainer.strategies.layers import refuse_sparse
from trainer.strategies.pipelined import Pipelined
from trainer.strategies.placed import Placed, TaskNetwork
from trainer.strategies.staged import PlacedStages


@dataclass
class PP(Pipelined):
    """Each rank of a pipeline holds some stages of the network; a step's micro-batches flow through all of them.

    Degrees multiply to the processes: `replicate` pipelines side by side, each of whose stages is spread over `shard`
    ranks and cut over `tensor` ranks. All ranks of one pipeline read the same data. Orders of micro-batches:
    torch.distributed.pipelining.
    """

    @property
    def name(self) -> str:
        """The word for these degrees."""
        data = "fsdp_" if self.shard != 1 else "ddp_" if self.replicate != 1 else ""
        return f"{data}pp" + ("_tp" if self.tensor > 1 else "")

    def notes(self, network: nn.Module) -> list[str]:
        """Say which ranks do what, and what a user should know about this network here."""
        mesh, *others = super().notes(network)
        return [f"{mesh}; {self.layout(self.world.size).count} stages, {self.schedule}", *others]

    def data_ranks(self, world_size: int) -> int:
        """Each part of each pipeline reads a slice of its own."""
        self.layout(world_size)
        return super().data_ranks(world_size)

    def refuse_shares(self, world_size: int, share: int, micro_batches: int, uneven: bool) -> None:
        """Refuse unequal micro-batches, and numbers of them that the schedule cannot run: torch would hang or fail."""
        if uneven:
            raise Refusal("loop.uneven=true: a pipeline's micro-batches are of one size; strategy=ddp or fsdp takes it")
        layout = self.layout(world_size)
        if not takes(self.schedule, layout, micro_batches):
            fitting = [n for n in range(1, share + 1) if share % n == 0 and takes(self.schedule, layout, n)]
            nearest = sorted(fitting, key=lambda n: abs(n - micro_batches))[:2]
            said = f"nearest: loop.micro_batches={' or '.join(map(str, sorted(nearest)))}; " if nearest else ""
            raise Refusal(
                f"{self.schedule} cannot run {micro_batches} micro-batches over {layout.count} stages on {layout.ranks}"
                f" ranks; {said}GPipe and 1F1B take any number"
            )

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse a network that cannot be cut into so many stages, and fields that do not go together."""
        self._refuse_fields(world_size)
        self._refuse_backend()
        super().check(task, network, world_size)
        refuse_sparse(network, self.name)
        cut_stages(TaskNetwork(task, network), task.plan(network).cuts, self.layout(world_size).count)
        if self.tensor > 1:
            refuse_plan(network, task.plan(network), self.tensor)

    def build(self, task: Task, network: nn.Module, example: Any) -> Placed:
        """Collective: put this rank's stages of a network here."""
        return PlacedStages(self, task, network, example, self.mesh["tensor"] if self.tensor > 1 else None)

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
        splits = KINDS[self.schedule].splits  # into gradients of inputs and of weights
        if self.machine.compile and splits:
            raise Refusal(
                f"compile=true: {self.schedule} computes gradients of inputs and weights apart, which compiled stages"
                " cannot; 1F1B, GPipe, Interleaved1F1B and LoopedBFS can"
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
