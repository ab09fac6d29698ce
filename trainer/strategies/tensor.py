"""One network cut over all processes: each holds a part of every large layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trainer.learning.task import Task
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor import refuse_plan
from trainer.strategies.joined import Meshed
from trainer.strategies.layers import refuse_sparse
from trainer.strategies.placed import Placed
from trainer.strategies.placed_tensor import PlacedTensor


@dataclass
class TP(Meshed):
    """One network cut over all processes by its plan; all read the same data, activations travel in every layer."""

    def data_ranks(self, world_size: int) -> int:
        """One slice: tensor ranks read the same samples."""
        return 1

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients, a network without a plan, or one whose sizes do not divide."""
        refuse_sparse(network, self.name)
        refuse_plan(network, task.plan(network), world_size)

    def _arrange(self) -> None:
        self.data = Ranks()
        self.mesh = init_device_mesh(self.device.type, (self.world.size,), mesh_dim_names=("tensor",))

    def build(self, task: Task, network: nn.Module, example: Any) -> Placed:
        """Collective: cut a network over all ranks."""
        return PlacedTensor(self, task, network, example, self.mesh)
