"""Copies of a network that is cut: tensor ranks inside, data ranks outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trainer.learning.task import Task
from trainer.parallel.buckets import average_gradients
from trainer.parallel.ranks import Group
from trainer.parallel.tensor import refuse_plan
from trainer.refusal import Refusal
from trainer.strategies.joined import Meshed
from trainer.strategies.layers import refuse_sparse
from trainer.strategies.placed import Placed
from trainer.strategies.placed_tensor import PlacedTensor


@dataclass
class DDPTP(Meshed):
    """Every `tensor` neighbouring processes hold one copy of the network, cut by its plan; copies average gradients."""

    tensor: int = 2  # processes that share one copy; keep them on one machine
    bucket_mb: int = 25  # MiB of gradients in one all-reduce

    @property
    def name(self) -> str:
        """The word that chose it."""
        return "ddp_tp"

    def data_ranks(self, world_size: int) -> int:
        """One slice a copy of the network. Refusal where the processes do not make up whole copies."""
        if self.tensor < 1 or world_size % self.tensor:
            fitting = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
            raise Refusal(
                f"{world_size} processes / strategy.tensor {self.tensor} is not whole; strategy.tensor can be {fitting}"
            )
        return world_size // self.tensor

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients, a network without a plan, or one whose sizes do not divide."""
        super().check(task, network, world_size)
        refuse_sparse(network, self.name)
        refuse_plan(network, task.plan(network), self.tensor)

    def _arrange(self) -> None:
        shape = (self.data_ranks(self.world.size), self.tensor)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "tensor"))
        self.data = Group(self.mesh.get_group("replicate"))

    def build(self, task: Task, network: nn.Module, example: Any) -> Placed:
        """Collective: put a cut copy of a network on every `tensor` ranks."""
        return _Placed(self, task, network, example, self.mesh["tensor"])


class _Placed(PlacedTensor):
    strategy: DDPTP

    def _average(self) -> None:
        """Average what each rank holds with its peers in the other copies.

        DDP around cut parameters trains right but loses them from the state, hence an all-reduce of one's own.
        """
        average_gradients(list(self.network.parameters()), self.strategy.data, self.strategy.bucket_mb * 2**20)
