"""Places of several processes: one group that all of them join; where ranks hold shards, a grid of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.learning.optimizer import sparse_embeddings
from trainer.learning.task import Task
from trainer.parallel.batch_norm import refuse_own_statistics
from trainer.parallel.mesh import AXES, described, make_mesh, ranks_along, spread
from trainer.parallel.outline import outline
from trainer.parallel.ranks import Group, join_group, leave_group, refuse_backend
from trainer.parallel.tensor import refuse_plan
from trainer.refusal import Refusal
from trainer.strategies.base import Strategy
from trainer.strategies.votes import Votes, VotesApart


@dataclass
class Joined(Strategy):
    """A place whose processes are one group, which all of them join; each reads samples of its own."""

    world: Group = field(init=False, repr=False)

    def data_ranks(self, world_size: int) -> int:
        """Every process reads its own slice."""
        return world_size

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse a device whose tensors cannot be sent, and BatchNorms that cannot be synchronised where they shall."""
        refuse_backend(self.machine.kind, self.machine.backend)
        if self.sync_bn and self.data_ranks(world_size) > 1:
            refuse_own_statistics(network)

    def _refuse_sparse(self, network: nn.Module) -> None:
        """Refuse embeddings whose gradients are sparse, where what travels is dense."""
        for name in sparse_embeddings(network):
            raise Refusal(
                f"strategy={self.name} sends dense gradients, and the embedding {name} makes sparse ones; "
                "build it with sparse=False, or use strategy=ddp distributed.backend=gloo"
            )

    def __enter__(self) -> Self:
        self.device = self.machine.claim_device()  # first: NCCL binds the group to the current device
        self.world = join_group(self.machine.launch, self.device, self.machine.backend, self.machine.timeout)
        self._arrange()
        self.use_long_timeout()  # last: torch makes the groups of a mesh with times of its own
        return self

    def _arrange(self) -> None:
        """Collective: say which ranks read different data (`data_group`), and make what other groups there are."""
        self.data_group = self.world

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        leave_group(self.world, clean=error is None)

    def notes(self, network: nn.Module) -> list[str]:
        """What a user should know; of a process that nobody launched, how there would be two."""
        # no launcher left an address; where there are GPUs the run says anyway how all of them are used
        alone = not self.machine.launch.address and not self.machine.on_gpu
        forgotten = [f"{self.name} has one process, so it shares nothing; with two: processes=2"] if alone else []
        return [*forgotten, *super().notes(network)]

    def votes(self) -> Votes:
        """What the ranks of one loop ask each other in its steps."""
        return VotesApart(self)

    def groups(self) -> list[ProcessGroup]:
        """All ranks, and whichever other groups stand in its fields, each once."""
        return list(dict.fromkeys(ranks.group for ranks in vars(self).values() if isinstance(ranks, Group)))


@dataclass
class Meshed(Joined):
    """A grid of ranks that hold shards: along an axis they differ in what it is named for.

    A field with the name of an axis says its degree; one that is None takes what the others leave.
    """

    axis: ClassVar[str]  # which one the mesh has even where its degree is 1
    bucket_mb: int = 25  # MiB of gradients in one all-reduce, of parameters that are not spread over data ranks
    mesh: DeviceMesh = field(init=False, repr=False)

    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks along each axis. Refusal where they do not multiply to the processes."""
        own = vars(self)
        return spread(world_size, {axis: own[axis] for axis in AXES if axis in own})

    def data_ranks(self, world_size: int) -> int:
        """Copies and the shards of a copy read samples of their own; stages and tensor ranks share theirs."""
        degrees = self.degrees(world_size)
        return degrees.get("replicate", 1) * degrees.get("shard", 1)

    def outline(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
        """The network without values, where its constructor allows that: ranks hold shards, one builds the whole."""
        return outline(make)

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients; and with tensor ranks what has no plan, or sizes that do not divide."""
        super().check(task, network, world_size)
        self._refuse_sparse(network)
        tensor = self.degrees(world_size).get("tensor", 1)
        if tensor > 1:
            refuse_plan(network, task.plan(network), tensor)

    def _arrange(self) -> None:
        # one group for each axis, and one for the data ranks, which may be the product of two
        self.mesh = make_mesh(self.device.type, self.degrees(self.world.size), always=self.axis)
        self.data_group = ranks_along(self.mesh, "replicate", "shard")

    def groups(self) -> list[ProcessGroup]:
        """All ranks, the data ranks, and those along each axis."""
        return [*super().groups(), *self.mesh.get_all_groups()]

    def notes(self, network: nn.Module) -> list[str]:
        """Say which ranks do what, and what a user should know about this network here."""
        return [f"mesh {described(self.degrees(self.world.size))}", *super().notes(network)]
