"""`ParallelModel` for ranks that hold shards; and for context ranks, which have parts of the same sequences."""

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
from trainer.learning.freezing import frozen_names
from trainer.learning.muon import Muon
from trainer.learning.optimizer import Groups, Make, make_trial_optimizer
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
from trainer.parallel.meta_model import allocate_empty, broadcast_values, move_to_meta
from trainer.parallel.muon_on_shards import MuonOnShards
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
    """A network of which ranks hold shards; its layers are split along the mesh's axis "tensor", if there is one."""

    strategy: Meshed

    def __init__(self, strategy: Meshed, task: Task, network: nn.Module, example: Any) -> None:
        self._tensor_ranks = ranks_along(strategy.mesh, "tensor")
        super().__init__(strategy, task, network, example)

    @override
    def materialize(self, network: nn.Module) -> nn.Module:
        """The network without values, because no rank need hold all of it. `shard` gives it its values."""
        self._values = move_to_meta(network)
        self.memory_format.convert_weights(network)
        return network

    @override
    def parallelize(self) -> list[nn.Module]:
        self._split(self.network, self.plan)
        return [self.network]

    def _split(self, network: nn.Module, plan: Plan) -> None:
        """Split the layers that the plan names over the tensor ranks, if there are any, and their random numbers.

        Then spread its experts over data ranks.
        """
        if self._tensor_ranks.size > 1:
            # in place: DTensors, as yet without values
            frozen = frozen_names(network)
            parallelize_module(network, self.strategy.mesh["tensor"], dict(plan.tensor))
            for name in frozen:  # torch's SequenceParallel makes new parameters, which learn
                network.get_parameter(name).requires_grad_(False)
            self.rng.set_ranks(self._tensor_ranks, Ranks(), 1)
        dtype = torch.bfloat16 if vars(self.strategy).get("param_dtype") else None
        self.strategy.experts.apply(network, plan, self.strategy.device, dtype)

    @override
    def shard(self, names: list[str]) -> None:
        self._load_values(self.strategy.device)

    def _load_values(self, shards: torch.device) -> None:
        """Collective: give a split and sharded network its values. shards: the device of sharded parameters."""
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
        # first the sums over tensor ranks, which complete each gradient
        redistribute_gradients(self.network.parameters())
        # then the mean over the data ranks, of what fully_shard has not averaged in the backward
        average_gradients(self._copied, self.strategy.loss_group, self.strategy.bucket_mb * 2**20)
        self.strategy.experts.average_gradients(self.network)
        # last: afterwards gradients are the same bits on all tensor ranks
        self._shared.broadcast_gradients()
        if self.before_first_step and self.machine.compare_copies:
            self._shared.check_gradients()  # before anything is learned

    @override
    def settle(self) -> None:
        """Collective: running statistics become the mean of the data ranks, taken from the first tensor rank."""
        super().settle()
        self.average.synchronize_statistics(partial(broadcast_buffers, self.network, self._tensor_ranks))

    @override
    def gather_output(self, output: Any) -> Any:
        return map_tensors(output, lambda x: x.full_tensor() if isinstance(x, DTensor) else x)

    @override
    def optimizer(self, make: Make, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer; split and whole parameters in separate groups, because its kernels take no mixture.

        Collective for Muon. Refusal for another one whose class says that it needs whole matrices.
        """
        unmixed = [part for group in groups for part in _split_by_mesh(group)]
        trial = make_trial_optimizer(make)
        if isinstance(trial, Muon):
            return MuonOnShards(make, unmixed, self.strategy.stage_group, self.strategy.stage_places())
        shards = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
        if shards and getattr(trial, "whole_matrices", False):
            raise Refusal(
                f"strategy={self.strategy.name}: {type(trial).__name__} computes with whole matrices"
                " (whole_matrices = True), and ranks hold shards here; strategy=ddp and strategy=zero1 give it whole"
                " ones"
            )
        optimizer = make(unmixed)
        if not optimizer.defaults.get("fused") or isinstance(optimizer, FUSED):
            return optimizer
        return make([{**group, "fused": False} for group in unmixed])

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: the base's step. Refusal if the optimizer needs an operation that torch cannot do with shards."""
        try:
            return super().optimizer_step(optimizer, max_norm)
        except (RuntimeError, NotImplementedError) as error:
            # torch knows most operations on shards, not all; and some optimizers need others only in a later step
            if not re.search("dtensor|sharding|placement", str(error), re.I):
                raise
            reason = str(error).split(". ")[0].splitlines()[0][:200]
            raise Refusal(
                f"strategy={self.strategy.name}: {type(optimizer).__name__} cannot step parameters of which ranks hold"
                f" shards ({reason}); under strategy=zero1 and strategy=ddp each is whole where it is stepped"
            ) from error

    @override
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The tensors for a checkpoint, after a check that copies on tensor ranks are still equal."""
        if self.machine.compare_copies:
            self._shared.check_gradients()
            check_replicated_parameters(self.network, self._tensor_ranks)
        return super().state(optimizer)


def _split_by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A parameter group as several: a group for each mesh that parameters lie on, and one for plain tensors."""
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_mesh.values()] or [group]  # an empty one stays


class ContextParallelModel(ShardedModel):
    """The same, with sequences cut over the context ranks, if there are any.

    Callers do not know of it: batches come whole, and the sums that are returned are those of whole sequences.
    """

    @override
    def _split(self, network: nn.Module, plan: Plan) -> None:
        super()._split(network, plan)
        self.rng.set_ranks(self._tensor_ranks, self.strategy.context_group, max_pieces(self.plan))
        apply_context_parallel(network, plan, self.strategy.context_group, self.strategy.device.type)

    @override
    def stretches(self, tokens: int) -> tuple[Ranks, Pieces]:
        ranks = self.strategy.context_group
        return ranks, rank_pieces(ranks.rank, ranks.size, tokens // ranks.size, max_pieces(self.plan))

    @override
    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """The base's, for this rank's part of each sequence; returns the sums of all context ranks, on each of them."""
        ranks = self.strategy.context_group
        sums = super().forward_backward([self._shard_batch(batch) for batch in batches], step)
        return all_reduce_sums(sums, ranks, self.strategy.device)  # the context ranks; a few numbers

    def _shard_batch(self, batch: Any) -> Any:
        ranks = self.strategy.context_group
        inputs, targets = shard_sequences((batch.inputs, batch.targets), ranks, max_pieces(self.plan))
        # each context rank counts its parts of the sequences, so a global batch has as many more of them
        return batch._replace(inputs=inputs, targets=targets, total=batch.total * ranks.size)

    @override
    def losses(self, forward: Forward, inputs: Any, targets: Any) -> dict[str, Tensor]:
        self.rng.set_tokens(count_tokens(inputs))
        return super().losses(forward, inputs, targets)

    @override
    def evaluate_batch(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        ranks = self.strategy.context_group
        local = shard_sequences((inputs, targets), ranks, max_pieces(self.plan))
        self.rng.set_tokens(count_tokens(local))
        sums = super().evaluate_batch(batch, *local)
        if ranks.size == 1:
            return sums
        totals = all_reduce_sums(sums, ranks, self.strategy.device)  # the context ranks; a few numbers
        # every context rank has counted each sample; and if samples are the weights, loss and weight as well
        repeated = ("samples", "weight", "loss") if type(self.task).weight is Task.weight else ("samples",)
        return totals | {name: totals[name] / ranks.size for name in repeated}
