"""`Strategy`: how a network is spread over processes and devices. The base class: one process on one device.

Here is what a strategy checks before training, and what it builds. `rank_context.py` has device and groups of a rank,
`parallel_model.py` one network with the methods of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trainer.launch.devices import uses_pinned_memory
from trainer.learning.task import Task
from trainer.messages import Refusal, format_count, format_names
from trainer.parallel.batch_norm import local_batch_norms
from trainer.parallel.rng.random_draw import DrawSites
from trainer.parallel.rng.row_owners import find_draw_sites
from trainer.strategies.nonfinite_check import NonFiniteCheck, NonFiniteCheckOnDevice
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.rank_context import RankContext, RankStopVotes, StopVotes
from trainer.strategies.replica_check import NoReplicaCheck
from trainer.strategies.step_timing import StragglerCheck


@dataclass
class Strategy(RankContext):
    """How a network is spread over processes and devices; its fields are the keys of the group `strategy`.

    Before training it refuses what it cannot do, then it builds the network of this rank. This class: one process.
    """

    @property
    def name(self) -> str:
        """Its name in the output: as the group `strategy` has it."""
        return type(self).__name__.lower()

    # before there is a process group

    def data_ranks(self, world_size: int) -> int:
        """How many of these processes read different samples. Refusal if the strategy cannot use so many processes."""
        if world_size > 1:
            raise Refusal(f"strategy={self.name} uses one process, {world_size} were started; use strategy=ddp")
        return 1

    def refuse_compile(self) -> None:
        """Refuse what cannot be compiled as `compile` says."""

    def refuse_shares(self, world_size: int, share: int, micro_batches: int, uneven: bool) -> None:
        """Refuse this number of micro-batches, or data ranks with different numbers of samples (`uneven`).

        share: the samples of a data rank in a step.
        """

    def outline(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
        """The network, to be checked and built: here whole, because every rank keeps all of it.

        If ranks hold shards, it has no values (meta device); or it has values, and the text says why.
        """
        return make(), ""

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse a network that this strategy cannot spread."""

    def refuse_forward(self, task: Task, network: nn.Module, world_size: int, example: Callable[[], Any]) -> None:
        """Refuse a network for what its forward does. `example` makes one small (inputs, targets), on the host."""

    def refuse_alone(self, what: str) -> None:
        """Refuse something that one rank does alone with the whole network, if it has only a part of it."""

    def refuse_outputs(self, what: str, world_size: int) -> None:
        """Refuse something that needs the whole output of a sample, if no rank has it."""

    # inside `with strategy:`

    def notes(self, network: nn.Module) -> list[str]:
        """Sentences about this network under this strategy, for the first lines of the output."""
        notes = []
        # layers whose effect depends on which samples a micro-batch has: with them curves differ between strategies
        if norms := 0 if self.sync_bn else len(local_batch_norms(network)):
            layers = format_count(norms, "BatchNorm layer")
            notes.append(f"{layers}: the curve depends on micro-batches and, without strategy.sync_bn, on data ranks")
        few_bits = (torch.bfloat16, torch.float16)
        narrow = [
            name for name, weight in network.named_parameters() if weight.requires_grad and weight.dtype in few_bits
        ]
        if narrow and self.machine.resolved_precision != "fp64":
            notes.append(
                f"{format_names(narrow, 2)}: learned in bf16 or fp16, as the network has them, so small updates are"
                " rounded away; build it in fp32 (from_pretrained(…, dtype=torch.float32)): precision=bf16 computes in"
                " bf16, and keeps weights in fp32"
            )
        if (
            self.machine.compile is not None
            and self.machine.compile.mode == "reduce-overhead"
            and self.device.type != "cuda"
        ):
            notes.append(f"compile.mode=reduce-overhead: {self.device.type} has no CUDA graphs, so it is default")
        # torch's own random numbers come from a rank's generator, not from the sample
        drops = sum(isinstance(module, _DropoutNd) and module.p > 0 for module in network.modules())
        if drops and self.dropout == "native":
            layers = format_count(drops, "dropout layer")
            notes.append(f"{layers}: the curve depends on micro-batches and data ranks; loop.dropout=sample mends that")
        if self.activation_offload and not uses_pinned_memory(self.device):
            notes.append(f"strategy.activation_offload: nothing to offload on {self.device.type}, which has one memory")
        return notes

    @property
    def devices_used(self) -> float:
        """How many devices compute for the run; a device that processes share counts once."""
        if not self.machine.on_gpu or not self.machine.shares_devices:
            return self.world.size
        # processes of one machine share its devices: four processes on two GPUs are two devices
        return self.world.size * min(1.0, torch.accelerator.device_count() / self.machine.launch.local_world_size)

    def votes(self) -> StopVotes:
        """The votes of the ranks in the steps of one loop: is somebody to stop, has a clock run out?"""
        return RankStopVotes(self) if self.world.size > 1 else StopVotes()

    def pace(self) -> StragglerCheck:
        """Collective: finds ranks that hold up the others in one loop."""
        return StragglerCheck(self.world, stage=0, on_cpu=self.device.type == "cpu")

    def copies(self, network: nn.Module) -> NoReplicaCheck:
        """Collective: compares copies of tensors between ranks in one loop. Here there are none."""
        return NoReplicaCheck()

    def lookout(self, allowed: int = 0) -> NonFiniteCheck:
        """Checks the numbers of every step of one loop, and what it saves, for NaN and infinity.

        allowed: how many of a hundred steps may be left out instead of ending the run.
        """
        if self.device.type == "cpu":
            return NonFiniteCheck(self.world, allowed)
        return NonFiniteCheckOnDevice(self.world, self.device, allowed)

    def draw_sites(self, task: Task, network: nn.Module, example: Callable[[int], Any]) -> DrawSites | None:
        """Collective: whose the rows of each random tensor are, as a few forwards show; None where nobody asks for it.

        example: makes so many samples, (inputs, targets) on the host. Refusal for what would repeat random numbers.
        """
        if self.dropout == "native":
            return None
        # all ranks look, because a forward may have collectives of its own, and follow what the main one finds
        found = self.world.broadcast_value(find_draw_sites(task, network, example, self.device))
        if self.machine.compile is None or not found.sites:
            return found
        mode = self.machine.compile.mode
        if mode != "default":
            raise Refusal(
                f"compile.mode={mode}: the network draws random numbers for each sample (loop.dropout=sample), and a"
                " CUDA graph repeats those that it was recorded with; use loop.dropout=native, or under tensor ranks"
                " compile.mode=default"
            )
        if torch.__version__ < "2.13":
            raise Refusal(
                f"compile.mode={mode}: the network draws random numbers for each sample (loop.dropout=sample), and"
                f" torch {torch.__version__} does not keep the order of draws in a graph; use loop.dropout=native,"
                " under tensor ranks compile.mode=null, or torch 2.13 or newer"
            )
        return found

    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        """Collective: build the network of this rank. `example`: one small (inputs, targets), to see a step."""
        return ParallelModel(self, task, network, example)
