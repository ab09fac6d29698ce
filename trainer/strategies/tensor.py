"""One network cut over all processes: each holds a part of every large layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainer.data.tree import changed
from trainer.learning.task import Task
from trainer.parallel.masks import Masks
from trainer.parallel.outline import make_room, send_values, set_aside
from trainer.parallel.ranks import Group, Ranks
from trainer.parallel.shared import Shared, refuse_drift, share_buffers
from trainer.parallel.tensor import cut, refuse_plan, settle
from trainer.strategies.base import Strategy
from trainer.strategies.joined import Meshed
from trainer.strategies.layers import refuse_sparse
from trainer.strategies.placed import Placed

TAKES_CUT = (torch.optim.Adam, torch.optim.AdamW)  # whose fused step knows DTensors, on torch 2.11 to 2.15


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


class PlacedTensor(Placed):
    """A network of which ranks hold parts: cut over those of a mesh axis named "tensor", where there is one."""

    def __init__(
        self, strategy: Strategy, task: Task, network: nn.Module, example: Any, mesh: DeviceMesh | None
    ) -> None:
        self._mesh = mesh
        self._tensor_ranks = Group(mesh.get_group()) if mesh else Ranks()
        self._masks = Masks(strategy.device, self._tensor_ranks.rank)
        super().__init__(strategy, task, network, example)

    def _arrived(self, network: nn.Module) -> nn.Module:
        """The network without values: no rank need hold all of it. They follow when it is clear who holds what."""
        self._values = set_aside(network)
        self._lay_out(network)
        return network

    def _cut(self) -> None:
        if self._mesh:
            cut(self.network, self._mesh, self._plan)
            self._masks.follow(self.network, self._plan)

    def _parts_lie_on(self) -> torch.device:
        """Where this rank keeps its part of what is spread."""
        return self.strategy.device

    def _give_values(self) -> None:
        make_room(self.network, self.strategy.device, self._parts_lie_on())
        send_values(self._values, self.network, self.strategy.world, self.strategy.device)
        del self._values

    def _computing(self) -> Any:
        stack = ExitStack()
        stack.enter_context(super()._computing())
        stack.enter_context(loss_parallel())  # for outputs that the plan leaves cut by class; others are untouched
        return stack

    def _settle_gradients(self) -> None:
        self._masks.forget()
        settle(self.network.parameters())
        self._average()
        self._shared.decide()  # the last to touch gradients: afterwards they are the same bits on all tensor ranks
        if self._young:
            self._shared.refuse_apart()  # before anything is learned

    def _average(self) -> None:
        """Collective: gradients become their mean over the data ranks, where that has not been done yet."""

    @cached_property
    def _shared(self) -> Shared:
        return Shared(self.network, self._tensor_ranks)

    def settle(self) -> None:
        """Collective: running statistics become the data ranks' mean, and those of the first tensor rank."""
        super().settle()
        share_buffers(self.network, self._tensor_ranks)

    def _whole(self, output: Any) -> Any:
        return changed(output, lambda part: part.full_tensor() if isinstance(part, DTensor) else part)

    def optimizer(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Build the optimizer; cut and whole parameters in groups of their own, for its kernels take no mixture."""
        parts = [part for group in groups for part in _unmixed(group)]
        optimizer = make(parts)
        if not optimizer.defaults.get("fused") or isinstance(optimizer, TAKES_CUT):
            return optimizer
        return make([{**part, "fused": False} for part in parts])

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What a checkpoint stores, after a look whether the whole parameters are still the same everywhere."""
        self._shared.refuse_apart()
        refuse_drift(self.network, self._tensor_ranks)
        return super().state(optimizer)


def _unmixed(group: dict[str, Any]) -> list[dict[str, Any]]:
    alike: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        alike.setdefault(mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in alike.values()]
