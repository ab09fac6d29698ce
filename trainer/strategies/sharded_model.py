"""A network of which ranks hold shards, and one whose ranks share samples by sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from typing_extensions import override

from trainer.data.nested_tensors import map_tensors
from trainer.learning.optimizer import Groups, Make
from trainer.learning.parallel_plan import Plan
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.parallel.buckets import all_reduce_sums, average_gradients
from trainer.parallel.context_parallel import (
    Pieces,
    apply_context_parallel,
    count_tokens,
    max_pieces,
    rank_pieces,
    shard_sequences,
)
from trainer.parallel.device_mesh import ranks_along
from trainer.parallel.fully_shard import unsharded_parameters
from trainer.parallel.meta_model import allocate_empty, broadcast_values, take_values
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_parallel import (
    ReplicatedParameters,
    broadcast_buffers,
    check_replicated_parameters,
    redistribute_gradients,
)
from trainer.strategies.loss import Forward
from trainer.strategies.multi_process import Meshed
from trainer.strategies.parallel_model import ParallelModel

FUSED = (torch.optim.Adam, torch.optim.AdamW)  # whose fused step knows DTensors, on torch 2.11 to 2.15


class ShardedModel(ParallelModel):
    """A network of which ranks hold shards: split over those of the mesh's axis "tensor", where there is one."""

    strategy: Meshed

    def __init__(self, strategy: Meshed, task: Task, network: nn.Module, example: Any) -> None:
        self._tensor_ranks = ranks_along(strategy.mesh, "tensor")
        super().__init__(strategy, task, network, example)

    @override
    def materialize(self, network: nn.Module) -> nn.Module:
        """The network without values: no rank need hold all of it. They follow when it is clear who holds what."""
        self._values = take_values(network)
        self.memory_format.lay_out(network)
        return network

    @override
    def parallelize(self) -> list[nn.Module]:
        self._split(self.network, self.plan)
        return [self.network]

    def _split(self, network: nn.Module, plan: Plan) -> None:
        """Split the layers that the plan names over the tensor ranks, if there are any, and their random numbers."""
        if self._tensor_ranks.size > 1:
            # in place: DTensors, as yet without values
            parallelize_module(network, self.strategy.mesh["tensor"], dict(plan.tensor))
            self.rng.follow_plan(network, plan, self._tensor_ranks)

    @override
    def shard(self, names: list[str]) -> None:
        self._fill(self.strategy.device)

    def _fill(self, shards: torch.device) -> None:
        """Collective: an outline that was split and spread gets its values. shards: where spread parameters lie."""
        allocate_empty(self.network, self.strategy.device, shards)
        broadcast_values(self._values, self.network, self.strategy.world, self.strategy.device)
        del self._values
        # only now is it clear what each rank holds of which parameter
        self._copied = unsharded_parameters(self.network)
        self._shared = ReplicatedParameters(self.network, self._tensor_ranks)

    @contextmanager
    @override
    def compute_context(self) -> Iterator[None]:
        # loss_parallel: for outputs that the plan leaves split by class, and only those
        with super().compute_context(), loss_parallel():
            yield

    @override
    def finish_gradients(self) -> None:
        self.rng.end_step()
        # sums over tensor ranks first: means of halves would be means of nothing
        redistribute_gradients(self.network.parameters())
        # the data ranks' mean, of what fully_shard has not averaged in the backward
        average_gradients(self._copied, self.strategy.loss_group, self.strategy.bucket_mb * 2**20)
        # the last to touch gradients: afterwards they are the same bits on all tensor ranks
        self._shared.broadcast_gradients()
        if self.before_first_step and self.machine.compare_copies:
            self._shared.check_gradients()  # before anything is learned

    @override
    def settle(self) -> None:
        """Collective: running statistics become the data ranks' mean, and those of the first tensor rank."""
        super().settle()
        self.average.synchronize_statistics(partial(broadcast_buffers, self.network, self._tensor_ranks))

    @override
    def gather_output(self, output: Any) -> Any:
        return map_tensors(output, lambda x: x.full_tensor() if isinstance(x, DTensor) else x)

    @override
    def optimizer(self, make: Make, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer; split and whole parameters in groups of their own, for its kernels take no mixture."""
        unmixed = [one for group in groups for one in _split_by_kind(group)]
        optimizer = make(unmixed)
        if not optimizer.defaults.get("fused") or isinstance(optimizer, FUSED):
            return optimizer
        return make([{**group, "fused": False} for group in unmixed])

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: the base's step. Refusal where the optimizer asks torch for what it cannot do with shards."""
        try:
            return super().optimizer_step(optimizer, max_norm)
        except (RuntimeError, NotImplementedError) as error:
            # only in the first step can it be the optimizer's kind; torch knows most operations on shards, not all
            if not self.before_first_step or not re.search("dtensor|sharding|placement", str(error), re.I):
                raise
            said = str(error).split(". ")[0].splitlines()[0][:200]
            raise Refusal(
                f"strategy={self.strategy.name}: {type(optimizer).__name__} cannot step parameters of which ranks hold"
                f" shards ({said}); strategy=zero1 and ddp keep each of them whole"
            ) from error

    @override
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What a checkpoint stores, after a look whether what tensor ranks have in common is still the same."""
        if self.machine.compare_copies:
            self._shared.check_gradients()
            check_replicated_parameters(self.network, self._tensor_ranks)
        return super().state(optimizer)


def _split_by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    alike: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        alike.setdefault(mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in alike.values()] or [group]  # an empty one stays


class ContextParallelModel(ShardedModel):
    """A network that ranks may hold shards of, and whose sequences are cut over the context ranks, if there are any.

    Nobody above knows of stretches: batches come whole, and the sums that go back are those of whole sequences.
    """

    @override
    def _split(self, network: nn.Module, plan: Plan) -> None:
        super()._split(network, plan)
        apply_context_parallel(network, plan, self.strategy.context_group, self.strategy.device.type)

    @override
    def stretches(self, tokens: int) -> tuple[Ranks, Pieces]:
        ranks = self.strategy.context_group
        return ranks, rank_pieces(ranks.rank, ranks.size, tokens // ranks.size, max_pieces(self.plan))

    @override
    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """The base's, of this rank's stretches; the sums are those of all context ranks, on each of them."""
        ranks = self.strategy.context_group
        own = [self._stretch(batch) for batch in batches]
        return all_reduce_sums(super().forward_backward(own, step), ranks, self.strategy.device)

    def _stretch(self, batch: Any) -> Any:
        ranks = self.strategy.context_group
        inputs, targets = shard_sequences((batch.inputs, batch.targets), ranks, max_pieces(self.plan))
        # every context rank weighs its own stretches, so of the global batch there are as many more of them
        return batch._replace(inputs=inputs, targets=targets, total=batch.total * ranks.size)

    @override
    def losses(self, forward: Forward, inputs: Any, targets: Any) -> dict[str, Tensor]:
        self.rng.set_sequence_shard(self.strategy.context_group, count_tokens(inputs), max_pieces(self.plan))
        return super().losses(forward, inputs, targets)

    @override
    def evaluate_batch(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        ranks = self.strategy.context_group
        own = shard_sequences((inputs, targets), ranks, max_pieces(self.plan))
        self.rng.set_sequence_shard(ranks, count_tokens(own), max_pieces(self.plan))
        sums = super().evaluate_batch(batch, *own)
        if ranks.size == 1:
            return sums
        totals = all_reduce_sums(sums, ranks, self.strategy.device)
        # every context rank has counted each sample, and its loss by it where samples are what a loss is the mean of
        often = ("samples", "weight", "loss") if type(self.task).weight is Task.weight else ("samples",)
        return totals | {name: totals[name] / ranks.size for name in often}
