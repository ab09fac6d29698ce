"""Places of several processes: they join one group on entering and leave it at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.learning.task import Task
from trainer.parallel.batch_norm import refuse_own_statistics
from trainer.parallel.mesh import described
from trainer.parallel.outline import outline
from trainer.parallel.ranks import Group, join_group, leave_group
from trainer.strategies.base import Strategy


@dataclass
class Joined(Strategy):
    """A place whose processes are one group, which all of them join."""

    world: Group = field(init=False, repr=False)

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse BatchNorms that cannot be synchronised, where that is asked for."""
        if self.sync_bn:
            refuse_own_statistics(network)

    def __enter__(self) -> Self:
        self.device = self.machine.place()  # first: NCCL binds the group to the current device
        self.world = join_group(self.machine.launch, self.device, self.machine.backend, self.machine.timeout)
        self._arrange()
        self.take_time()  # torch makes the groups of a mesh with times of its own
        return self

    def _arrange(self) -> None:
        """Collective: say which ranks read different data (`data`), and make what other groups there are."""
        self.data = self.world

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_group(self.world, clean=error is None)

    def groups(self) -> list[ProcessGroup]:
        """All ranks; and those that read different data, where that is a group of its own."""
        data = [self.data.group] if isinstance(self.data, Group) and self.data is not self.world else []
        return [self.world.group, *data]


@dataclass
class Meshed(Joined):
    """A place whose ranks are a grid: ranks along an axis differ in what it is named for."""

    mesh: DeviceMesh = field(init=False, repr=False)  # of AXES (parallel/mesh.py) those that it needs

    def outline(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
        """The network without values, where its constructor allows that: ranks hold parts, and one builds the whole."""
        return outline(make)

    def groups(self) -> list[ProcessGroup]:
        """All ranks, the data ranks, and those along each axis."""
        return [*super().groups(), *self.mesh.get_all_groups()]


@dataclass
class Parted(Meshed):
    """A grid whose degrees its fields say."""

    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks along each axis. Refusal where they do not multiply to the processes."""
        raise NotImplementedError

    def data_ranks(self, world_size: int) -> int:
        """Each part of each copy reads a slice of its own."""
        degrees = self.degrees(world_size)
        return degrees["replicate"] * degrees["shard"]

    def notes(self, network: nn.Module) -> list[str]:
        """Say which ranks do what, and what a user should know about this network here."""
        return [f"mesh {described(self.degrees(self.world.size))}", *super().notes(network)]
