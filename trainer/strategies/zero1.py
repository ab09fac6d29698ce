"""ZeRO stage 1: every process has a copy of the network; each rank owns, updates and sends some parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from trainer.learning.optimizer import Groups, Make
from trainer.learning.task import Task
from trainer.parallel.buckets import to_accumulator
from trainer.parallel.gradient_clipping import global_norm
from trainer.parallel.parameter_owners import GradientReducer, assign_owners, broadcast_from_owners, make_owner_buckets
from trainer.parallel.process_group import as_group
from trainer.parallel.ranks import Group
from trainer.strategies.loss import Forward
from trainer.strategies.multi_process import Joined
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.replica_check import NoReplicaCheck, make_replica_check


@dataclass
class Zero1(Joined):
    """Every rank owns whole parameters: gradients are sent to their owner, which updates them and sends them to all.

    Stage 1 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
    """

    divides_parameters: ClassVar[bool] = True
    bucket_mb: int = 25  # MiB of gradients or parameters that are sent as one; larger: fewer and later
    owning: Group = field(init=False, repr=False)  # all ranks again, for gradients and parameters alone

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients: buckets are dense."""
        super().check(task, network, world_size)
        self.refuse_sparse(network)

    @override
    def make_groups(self) -> None:
        super().make_groups()
        # gradients are sent as soon as a backward has completed them, at another moment on each rank. In a separate
        # group they cannot mix with collectives of the network (sync_bn, gather)
        group = dist.new_group(timeout=self.machine.timeout)
        assert isinstance(group, ProcessGroup)
        self.owning = as_group(group)

    @override
    def copies(self, network: nn.Module) -> NoReplicaCheck:
        return make_replica_check(self, network)

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return Zero1Model(self, task, network, example)


class Zero1Model(ParallelModel):
    strategy: Zero1

    @override
    def wrap(self) -> Forward:
        # owners follow from sizes alone, so all ranks choose the same; a single rank sends nothing
        ranks = self.strategy.owning
        trainable = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        owner = assign_owners([parameter.nbytes for parameter in trainable], ranks.size)
        self._owner = dict(zip(trainable, owner, strict=True))
        self._buckets = make_owner_buckets(trainable, owner, self.strategy.bucket_mb * 2**20) if ranks.size > 1 else []
        self._delivery = GradientReducer(self._buckets, ranks)
        return self.step_module

    @override
    def grad_sync_context(self, last: bool) -> Any:
        if last:  # the last micro-batch: now sums are complete and go to their owners as the backward ends them
            self._delivery.begin()
        return super().grad_sync_context(last)

    @override
    def finish_gradients(self) -> None:
        self._delivery.finish()

    @override
    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """Collective: the norm over the gradients of all owners; the same on each rank, also if it owns nothing."""
        local = global_norm(gradients) if gradients else torch.zeros((), device=self.strategy.device)
        square = to_accumulator(local.to(self.strategy.device)).square()
        self.strategy.data_group.all_reduce_sum_(square).wait()  # the data ranks; 8 bytes travel
        return square.sqrt().to(self.machine.parameter_dtype)

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: update what this rank owns, and send it to all: afterwards ranks hold the same bits."""
        norm = super().optimizer_step(optimizer, max_norm)
        self.deliver_weights()
        return norm

    @override
    def deliver_weights(self) -> None:
        broadcast_from_owners(self._buckets, self.strategy.owning)  # all ranks; each sends the weights that it owns

    @override
    def optimizer(self, make: Make, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer over what this rank owns, with every group, also if none of it is this rank's.

        Frozen parameters have no owner.
        """
        rank = self.strategy.owning.rank
        return make(
            [{**group, "params": [p for p in group["params"] if self._owner.get(p) == rank]} for group in groups]
        )
