"""Places of several processes: they join one group on entering and leave it at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.parallel.ranks import Group
from trainer.parallel.world import join, leave
from trainer.strategies.base import Strategy


@dataclass
class Joined(Strategy):
    """A place whose processes are one group, which all of them join."""

    world: Group = field(init=False, repr=False)

    def __enter__(self) -> Self:
        self.device = self.machine.place()
        self.world = join(self.machine.launch, self.device, self.machine.backend, self.machine.timeout)
        self._arrange()
        return self

    def _arrange(self) -> None:
        """Collective: say which ranks read different data (`data`), and make what other groups there are."""
        self.data = self.world

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.world, clean=error is None)

    def groups(self) -> list[ProcessGroup]:
        """All ranks; and those that read different data, where that is a group of its own."""
        data = [self.data.group] if isinstance(self.data, Group) and self.data is not self.world else []
        return [self.world.group, *data]


@dataclass
class Meshed(Joined):
    """A place whose ranks are a grid: ranks along an axis differ in what it is named for."""

    mesh: DeviceMesh = field(init=False, repr=False)  # of AXES (parallel/mesh.py) those that it needs

    def groups(self) -> list[ProcessGroup]:
        """All ranks, the data ranks, and those along each axis."""
        return [*super().groups(), *self.mesh.get_all_groups()]
