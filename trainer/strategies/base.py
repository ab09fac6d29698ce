"""What a strategy is: how a network is spread over a place. The base spreads nothing: one process on one device.

A strategy in a file of its own says what it does differently: here which processes it can use and what it refuses, in
`process_topology.py` where ranks are and what they tell each other, in `parallel_model.py` the step of one network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trainer.learning.task import Task
from trainer.messages import Refusal, format_count
from trainer.parallel.batch_norm import local_batch_norms
from trainer.strategies.nonfinite_check import NonFiniteCheck, NonFiniteCheckOnDevice
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.rank_context import RankContext, StopVotes
from trainer.strategies.replica_check import NoReplicaCheck
from trainer.strategies.step_timing import StragglerCheck


@dataclass
class Strategy(RankContext):
    """How a network is spread over processes and devices; its fields are the keys of the group `strategy`.

    Checks what it cannot do before training, then builds the network of this rank. This class itself: one process.
    """

    @property
    def name(self) -> str:
        """The word that chose it."""
        return type(self).__name__.lower()

    # Before there is a process group.

    def data_ranks(self, world_size: int) -> int:
        """Into how many slices this many processes divide the data. Refusal where the strategy cannot use them."""
        if world_size > 1:
            raise Refusal(f"strategy={self.name} uses one process, {world_size} were started; use strategy=ddp")
        return 1

    def refuse_shares(self, world_size: int, share: int, micro_batches: int, uneven: bool) -> None:
        """Refuse numbers of micro-batches, or shares (a data rank's samples in a step) of unequal size."""

    def least_layers(self, world_size: int) -> int:
        """How many layers of a kind a network must have at least, to be spread over so many processes."""
        return 1

    def outline(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
        """The network to check and to place: here whole, as its constructor makes it, for every rank keeps all of it.

        Where ranks hold shards it has no values; or it has, and the text says why.
        """
        return make(), ""

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse a network that this strategy cannot spread."""

    def refuse_forward(self, task: Task, network: nn.Module, world_size: int, example: Callable[[], Any]) -> None:
        """Refuse a network for what its forward does. `example` makes one small (inputs, targets), on the host."""

    def refuse_alone(self, what: str) -> None:
        """Refuse what one rank would do with the whole network by itself, where it has only a part."""

    def refuse_outputs(self, what: str, world_size: int) -> None:
        """Refuse what needs all of a sample's output at once, where no rank has it."""

    # Inside.

    def notes(self, network: nn.Module) -> list[str]:
        """What a user should know about this network in this place, one line each, for the start of the run."""
        notes = []
        # layers whose effect depends on how samples are dealt to ranks and micro-batches: with them no two curves agree
        if norms := 0 if self.sync_bn else len(local_batch_norms(network)):
            layers = format_count(norms, "BatchNorm layer")
            notes.append(f"{layers}: the curve depends on micro-batches and, without strategy.sync_bn, on data ranks")
        drops = sum(isinstance(module, _DropoutNd) and module.p > 0 for module in network.modules())
        if drops and self.dropout == "native":
            layers = format_count(drops, "dropout layer")
            mended = "loop.dropout=sample mends that" + (", without compile" if self.machine.compile else "")
            notes.append(f"{layers}: the curve depends on micro-batches and data ranks; {mended}")
        return notes

    @property
    def devices_used(self) -> float:
        """How many devices compute for the run: one for each process, or a part of one that processes share."""
        if not self.machine.on_gpu or not self.machine.shares_devices:
            return self.world.size
        return self.world.size * min(1.0, torch.accelerator.device_count() / self.machine.launch.local_world_size)

    def votes(self) -> StopVotes:
        """What the ranks of one loop ask each other in its steps: to stop? has a clock run out?"""
        return StopVotes(self)

    def pace(self) -> StragglerCheck:
        """Collective: what compares how fast the ranks of one loop are."""
        return StragglerCheck(self.world, stage=0, on_cpu=self.device.type == "cpu")

    def copies(self, network: nn.Module) -> NoReplicaCheck:
        """Collective: what compares the copies that ranks hold of one loop's network. Here nobody is to have any."""
        return NoReplicaCheck()

    def lookout(self, allowed: int = 0) -> NonFiniteCheck:
        """What looks at the numbers of every step of one loop, and at what it saves: are they finite?

        allowed: how many of a hundred steps may be left out instead.
        """
        if self.device.type == "cpu":
            return NonFiniteCheck(self.world, allowed)
        return NonFiniteCheckOnDevice(self.world, self.device, allowed)

    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        """Collective: put a network here. `example`: one small (inputs, targets), for those that must see a step."""
        return ParallelModel(self, task, network, example)
