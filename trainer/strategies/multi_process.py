"""Base classes of strategies with several processes: `Joined`, in one group; `Meshed`, in a mesh of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from trainer.learning.optimizer import find_sparse_embeddings
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.parallel.batch_norm import refuse_custom_batch_norms
from trainer.parallel.context_parallel import refuse_context, refuse_sequences
from trainer.parallel.device_mesh import (
    DEGREES,
    format_degrees,
    make_mesh,
    make_sequence_mesh,
    places,
    ranks_along,
    resolve_degrees,
)
from trainer.parallel.expert_parallel import ExpertRanks
from trainer.parallel.float8_linear import refuse_no_float8_layers
from trainer.parallel.meta_model import build_meta_model
from trainer.parallel.process_group import join_group, leave_group, refuse_backend
from trainer.parallel.ranks import Group, Ranks
from trainer.parallel.rng.kernels import install_kernels, uninstall_kernels
from trainer.parallel.tensor_parallel import refuse_plan
from trainer.strategies.base import Strategy
from trainer.strategies.replica_check import NoReplicaCheck, make_replica_check
from trainer.strategies.step_timing import NoStallClock, StallClock, StepTimer, StragglerCheck


@dataclass
class Joined(Strategy):
    """A strategy with several processes: all join one process group, and each reads its own samples."""

    world: Group = field(init=False, repr=False)

    @override
    def data_ranks(self, world_size: int) -> int:
        """Every process reads its own samples."""
        return world_size

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse a device whose tensors cannot be sent, and layers that several data ranks cannot compute alike."""
        refuse_backend(self.machine.kind, self.machine.backend)
        if self.data_ranks(world_size) == 1:
            return
        if self.sync_bn:
            refuse_custom_batch_norms(network)
        for name, module in network.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm and not self.own_curve:
                raise Refusal(
                    f"the embedding {name or 'itself'} has max_norm: its forward changes weights, on each data rank"
                    " those of its own samples. Build it without, and limit what it gives in the network's forward;"
                    " or train on one data rank"
                )

    def refuse_sparse(self, network: nn.Module) -> None:
        """Refuse embeddings with sparse gradients, for strategies that send dense ones."""
        for name in find_sparse_embeddings(network):
            raise Refusal(
                f"strategy={self.name} sends dense gradients, and the embedding {name} makes sparse ones; "
                "build it with sparse=False, or use strategy=ddp distributed.backend=gloo"
            )

    @override
    def __enter__(self) -> Self:
        self.device = self.machine.claim_device()  # first: NCCL binds the group to the current device
        self.world = join_group(self.machine.launch, self.device, self.machine.backend, self.machine.timeout)
        self.watch = StepTimer(StallClock() if self.world.size > 1 else NoStallClock())
        self.make_groups()
        self.use_long_timeout()  # last: torch makes the groups of a mesh with times of its own
        install_kernels(self.device, self.dropout, self.machine.compile is not None)
        return self

    def make_groups(self) -> None:
        """Collective: set `data_group`, the ranks that read different samples, and create other groups."""
        self.data_group = self.world

    @override
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        uninstall_kernels(self.dropout)
        leave_group(self.world, clean=error is None)

    @override
    def notes(self, network: nn.Module) -> list[str]:
        """The sentences of the base class; and for a single process without a launcher, how to start two."""
        # no launcher has set an address; with GPUs the run prints anyway how to use all of them
        alone = not self.machine.launch.address and not self.machine.on_gpu
        hint = [f"{self.name} has only one process; to use two: processes=2"] if alone else []
        return [*hint, *super().notes(network)]

    @override
    def pace(self) -> StragglerCheck:
        return StragglerCheck(self.world, self.at().get("pipe", 0), on_cpu=self.device.type == "cpu")

    def at(self) -> dict[str, int]:
        """The place of this rank along each axis of the mesh; empty without a mesh."""
        return {}

    @override
    def groups(self) -> list[ProcessGroup]:
        """The groups in all fields, each once."""
        return list(dict.fromkeys(ranks.group for ranks in vars(self).values() if isinstance(ranks, Group)))


@dataclass
class Meshed(Joined):
    """A strategy whose ranks hold shards and form a mesh, with an axis for each kind of parallelism.

    Fields with the name of an axis are its size; None: the processes that the other axes leave.
    """

    divides_parameters: ClassVar[bool] = True
    axis: ClassVar[str]  # the axis that the mesh has even if its size is 1
    bucket_mb: int = 25  # MiB of gradients in one all-reduce, of parameters that are not spread over data ranks
    mesh: DeviceMesh = field(init=False, repr=False)  # axes by what ranks hold
    context_group: Ranks = field(init=False, repr=False)  # ranks that have other parts of the same sequences
    experts: ExpertRanks = field(init=False, repr=False)  # the ranks by the experts that they hold
    _learning: Ranks = field(init=False, repr=False)

    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks there are along each axis. Refusal if their product is not the number of processes."""
        degrees = {axis: vars(self)[axis] for axis in DEGREES if axis in vars(self)}
        if degrees.get("context") == 1:  # as a rule; then messages need not mention it
            del degrees["context"]
        return resolve_degrees(world_size, degrees)

    @override
    def data_ranks(self, world_size: int) -> int:
        """Copies, and the shards of a copy, read different samples; stages, context and tensor ranks the same ones."""
        degrees = self.degrees(world_size)
        return degrees.get("replicate", 1) * degrees.get("shard", 1)

    @override
    def outline(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
        """The network without values, if its constructor allows that: ranks hold shards, and one builds the whole."""
        return build_meta_model(make)

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients; with tensor or context ranks a missing plan, or sizes that do not divide."""
        super().check(task, network, world_size)
        self.refuse_sparse(network)
        if narrow := vars(self).get("param_dtype"):
            for name in (name for name, parameter in network.named_parameters() if parameter.is_complex()):
                raise Refusal(f"strategy.param_dtype={narrow}: {name} is complex, and {narrow} is real; leave it out")
        degrees = self.degrees(world_size)
        gathers = degrees.get("tensor", 1) * degrees.get("context", 1) > 1
        if gathers and self.machine.on_gpu and self.machine.backend == "gloo":
            # torch 2.11 ends with a segmentation fault in DTensor's all-gather, seen on an H200
            raise Refusal(
                "distributed.backend=gloo cannot gather a GPU's tensors as tensor and context ranks do: torch ends"
                " without a message; use nccl with a GPU for each process, or device=cpu for a trial"
            )
        if degrees.get("tensor", 1) > 1:
            if self.dropout == "native":
                raise Refusal(
                    f"strategy={self.name} loop.dropout=native: tensor ranks would hide the same places of every part"
                    " of an activation; loop.dropout=sample, the default, draws what one process does"
                )
            refuse_plan(network, task.plan(network), degrees["tensor"])
            if self.machine.float8:
                refuse_no_float8_layers(self.machine.float8, network, task.plan(network), degrees["tensor"])
        if degrees.get("context", 1) > 1:
            refuse_context(network, task.plan(network))
            if self.machine.compile is not None and self.dropout == "sample":
                raise Refusal(
                    f"strategy={self.name} compile.mode={self.machine.compile.mode}: a compiled network does not know"
                    " which tokens of a sample it has, so dropout cannot be each sample's own; set loop.dropout=native"
                    " (or no dropout, and that word), with strategy.tensor=1"
                )

    @override
    def refuse_forward(self, task: Task, network: nn.Module, world_size: int, example: Callable[[], Any]) -> None:
        """Refuse batches that context ranks cannot cut."""
        degrees = self.degrees(world_size)
        if degrees.get("context", 1) > 1:
            plan = task.plan(network)
            for what, tree in zip(("inputs", "targets"), example(), strict=True):
                refuse_sequences(tree, what, degrees["context"], plan, degrees.get("tensor", 1))

    @override
    def refuse_outputs(self, what: str, world_size: int) -> None:
        """Refuse it if context ranks have outputs of parts of sequences."""
        if self.degrees(world_size).get("context", 1) > 1:
            raise Refusal(
                f"{what} needs outputs of whole sequences, and context ranks have stretches; strategy=ddp gives them"
            )

    @override
    def refuse_alone(self, what: str) -> None:
        """Refuse it: no rank has the whole network."""
        raise Refusal(
            f"{what}: strategy={self.name} leaves a part of the network on each rank, and one rank writes the text; it"
            " works under strategy=ddp, zero1 and single. job=generate continues a text from any run's checkpoint, also"
            " while it trains"
        )

    @override
    def make_groups(self) -> None:
        degrees = self.degrees(self.world.size)
        context = degrees.pop("context", 1)
        # context ranks hold shards like data ranks, or else copies: what a rank holds does not depend on sequences
        innermost = "shard" if "shard" in degrees else "replicate"
        degrees[innermost] *= context
        # a group for each axis, and one of the ranks whose losses are added up (replicate × shard, with context)
        self.mesh = make_mesh(self.device.type, degrees, always=self.axis)
        self._learning, self.context_group = ranks_along(self.mesh, "replicate", "shard"), Ranks()
        self.data_group = self._learning
        expert, tensor = vars(self).get("expert", 1), degrees.get("tensor", 1)
        self.experts = ExpertRanks(self.device.type, self.world.size, expert, tensor)
        if context > 1:
            reading = make_sequence_mesh(self.device.type, self.world.size, context, tensor)
            self.context_group, self.data_group = (ranks_along(reading, axis) for axis in ("context", "samples"))

    @property
    @override
    def loss_group(self) -> Ranks:
        """The data ranks, and the context ranks, which have other parts of the same samples."""
        return self._learning

    @override
    def copies(self, network: nn.Module) -> NoReplicaCheck:
        """Compares each shard, and each whole tensor, with those of the ranks that hold the same."""
        return make_replica_check(self, network, self.places())

    @override
    def at(self) -> dict[str, int]:
        return self.places()[self.world.rank]

    @cached_property
    def stage_group(self) -> Ranks:
        """Collective when it is first asked for: the ranks that hold copies or shards of the same parameters."""
        split = "tensor" in (self.mesh.mesh_dim_names or ())
        return ranks_along(self.mesh, "replicate", "shard", "tensor") if split else self._learning

    def stage_places(self) -> list[dict[str, int]]:
        """Where each of these ranks is along each axis of the mesh."""
        stage = self.at().get("pipe")
        return [place for place in self.places() if place.get("pipe") == stage]

    def places(self) -> list[dict[str, int]]:
        """Where each rank is along each axis of the mesh, and among experts: nobody need be asked."""
        return [place | self.experts.place(rank) for rank, place in enumerate(places(self.mesh))]

    @override
    def groups(self) -> list[ProcessGroup]:
        """The groups in fields, and those along each axis of the mesh."""
        return [*super().groups(), *self.mesh.get_all_groups(), *self.experts.groups()]

    @override
    def notes(self, network: nn.Module) -> list[str]:
        return [f"mesh {format_degrees(self.degrees(self.world.size))}", *super().notes(network)]
