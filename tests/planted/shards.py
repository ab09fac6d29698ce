"""Mistakes of the program where ranks hold shards: fsdp, hsdp, tp and what is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from tests.planted.copies import GRADIENT, TIMES
from tests.planted.networks import rank
from tests.planted.plant import NET, STRATEGY, VIT, Change, Plant
from trainer.parallel.device_mesh import split_axes, to_local
from trainer.parallel.module_units import matching_modules
from trainer.parallel.ranks import Ranks


def without_replicas(original: Any) -> Any:
    """Parameters are spread over the shards of one copy, and nobody knows of the other copies."""
    return lambda root, network, names, mesh, how: original(root, network, names, mesh["shard"], how)


def multiplied(part: str, by: int) -> Change:
    """Gradients of some parameters are averaged over the ranks of another group."""

    def changed(original: Any) -> Any:
        def finish(self: Any) -> None:
            original(self)
            for name, parameter in self.network.named_parameters():
                if part in name:
                    to_local(parameter.grad).mul_(by)

        return finish

    return changed


def reduced_in_bf16(original: Any) -> Any:
    return lambda **more: original(**{**more, "reduce_dtype": torch.bfloat16})


def moved_frozen(original: Any) -> Any:
    """The decay reaches what does not learn."""

    @torch.no_grad()
    def after_step(self: Any, step: int) -> None:
        original(self, step)
        for parameter in self.network.parameters():
            if not parameter.requires_grad:
                to_local(parameter).mul_(1 - 1e-4)

    return after_step


def left_out(original: Any) -> Any:
    """One rank's shards stay what they were."""

    @torch.no_grad()
    def optimizer_step(self: Any, *args: Any) -> Any:
        before = [to_local(one).clone() for one in self.network.parameters()]
        norm = original(self, *args)
        for one, stale in zip(self.network.parameters(), before, strict=True):
            if rank():
                to_local(one).copy_(stale)
        return norm

    return optimizer_step


def summed_over_copies(original: Any) -> Any:
    def average_gradients(parameters: list[nn.Parameter], ranks: Ranks, *rest: Any) -> None:
        original(parameters, ranks, *rest)
        for parameter in parameters:
            if parameter.grad is not None:
                to_local(parameter.grad).mul_(ranks.size)

    return average_gradients


def own_copy(original: Any) -> Any:
    """The second copy begins with weights of its own."""

    def fill(self: Any, shards: Any) -> None:
        original(self, shards)
        with torch.no_grad():
            for parameter in self.network.parameters():
                to_local(parameter).mul_(1 + 1e-3 * (rank() // 2))

    return fill


def counted_twice(original: Any) -> Any:
    """What tensor ranks hold in common is counted once more."""

    def norm(gradients: list[Tensor]) -> Tensor:
        common = [gradient for gradient in gradients if not split_axes(gradient)]
        return (original(gradients).square() + original(common).square()).sqrt()

    return norm


def split(kind: type, change: Any) -> Change:
    """The first layer that a plan splits in this way computes otherwise."""

    def changed(original: Any) -> Any:
        def divide(self: Any, network: nn.Module, plan: Any) -> None:
            original(self, network, plan)
            keys = [key for key, style in plan.tensor.items() if isinstance(style, kind)]
            ((_, module), *_) = matching_modules(network, keys[-1])
            vars(module)["forward"] = change(module, module.forward)

        return divide

    return changed


def on_every_rank(module: Any, forward: Any) -> Any:
    """A row-wise layer adds its bias on every rank, before the sum."""

    def changed(x: Tensor) -> Tensor:
        output = forward(x)
        bias = module.bias if isinstance(output, DTensor) else module.bias.to_local()
        return output + bias

    return changed


def without_sum(module: Any, forward: Any) -> Any:
    """A row-wise layer gives each rank its own term of the sum."""

    def changed(x: Any) -> Any:
        own = functional.linear(x.to_local(), module.weight.to_local(), module.bias.to_local())
        return DTensor.from_local(own, module.weight.device_mesh, [Replicate()], run_check=False)

    return changed


class _OwnGradient(torch.autograd.Function):
    """A value whose gradient stays what this rank has found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return DTensor.from_local(grads[0].to_local(), grads[0].device_mesh, [Replicate()], run_check=False)


def without_sum_backward(module: Any, forward: Any) -> Any:
    """The gradient of a column-wise layer's input is each rank's own term of the sum."""
    return lambda x: forward(_OwnGradient.apply(x))


def first_rank(original: property) -> property:
    """All data ranks read what is the first one's."""
    return property(lambda self: replace(original.fget(self), rank=0))


def on_shards(original: Any) -> Any:
    """Each rank steps its shard of a matrix as if it were the matrix, and nobody gathers it."""

    class OnShards(original):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter, stand_in in self._stand_ins.items():
                stand_in.data, stand_in.grad = to_local(parameter).clone(), to_local(parameter.grad)
            self._step_inner()
            for parameter, stand_in in self._stand_ins.items():
                to_local(parameter).copy_(stand_in.data)
                self.state.pop(parameter)  # of a shape that no checkpoint takes

    return OnShards


CLIPPED = ("at step 1, clipped gradient", "at step 1, optimizer step", "at step 1, update")
STEP = ("at step 1, optimizer step", "at step 1, update")
TENSOR = "trainer.strategies.sharded_model"
SPLIT = f"{TENSOR}.ShardedModel._split"
FINISH = f"{TENSOR}.ShardedModel.finish_gradients"
UNSEEN = {
    f"{TENSOR}.ReplicatedParameters": lambda original: type(
        "Shared", (original,), {"check_gradients": lambda self: None}
    )
}
FOUR = 4

PLANTS = {
    "without_replicas": Plant(
        "hsdp does not reduce gradients over its copies",
        VIT,
        ("strategy=hsdp",),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.fsdp.apply_fully_shard": without_replicas},
        FOUR,
    ),
    "one_unit_summed": Plant(
        "the gradients of one unit are summed over the shards, not averaged",
        VIT,
        ("strategy=fsdp",),
        GRADIENT,
        STRATEGY,
        {FINISH: multiplied("blocks.0", 2)},
    ),
    "sharded_in_bf16": Plant(
        "gradients are reduced in bf16",
        NET,
        ("strategy=fsdp",),
        GRADIENT,
        STRATEGY,
        {"trainer.parallel.fully_shard.MixedPrecisionPolicy": reduced_in_bf16},
    ),
    "doubled_experts": Plant(
        "gradients of experts are twice as large (averaged over fewer ranks)",
        (*NET, "+model.kind=experts"),
        ("strategy=fsdp",),
        ("at step 1, gradient, middle.experts",),
        STRATEGY,
        {FINISH: multiplied("experts", 2)},
    ),
    "local_norm": Plant(
        "the norm is that of one rank's shards (torchtitan#766)",
        (*NET, "loop.max_norm=0.1"),
        ("strategy=fsdp",),
        ("at step 1, norm",),
        STRATEGY,
        {"trainer.parallel.gradient_clipping.ranks_along": lambda original: lambda *_: Ranks()},
    ),
    "on_shards": Plant(
        "Muon steps the shard of a matrix as if it were the matrix",
        (*VIT, "optimizer=muon"),
        ("strategy=fsdp",),
        ("at step 1, optimizer step, blocks.",),
        STRATEGY,
        {f"{TENSOR}.MuonOnShards": on_shards},
    ),
    "left_out_shards": Plant(
        "one rank does not update its shards",
        NET,
        ("strategy=fsdp",),
        STEP,
        STRATEGY,
        {f"{TENSOR}.ShardedModel.optimizer_step": left_out},
    ),
    "moved_frozen": Plant(
        "what is frozen is decayed",
        (*VIT, "model.freeze=[embed]"),
        ("strategy=fsdp",),
        ("at step 1, update, embed.",),
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.after_step": moved_frozen},
    ),
    "decayed_biases": Plant(
        "biases and norms are decayed as weights are",
        VIT,
        ("strategy=fsdp_tp",),
        ("at step 1, learning rate", *STEP),
        STRATEGY,
        {
            "trainer.jobs.build_trainer.parameter_groups": lambda original: (
                lambda one, _, *others: original(one, False, *others)
            )
        },
        FOUR,
    ),
    "counted_twice": Plant(
        "the norm counts twice what tensor ranks hold in common (NeMo RL#3788)",
        (*VIT, "loop.max_norm=0.1"),
        ("strategy=tp",),
        ("at step 1, norm",),
        STRATEGY,
        {"trainer.strategies.parallel_model.global_norm": counted_twice},
    ),
    "bias_on_every_rank": Plant(
        "a row-wise layer adds its bias on every rank",
        VIT,
        ("strategy=tp",),
        ("at step 1, forward", "at step 1, gradient"),
        STRATEGY,
        {SPLIT: split(RowwiseParallel, on_every_rank)},
    ),
    "row_without_sum": Plant(
        "a row-wise layer is not summed over the tensor ranks, and nobody looks whether they agree",
        VIT,
        ("strategy=tp",),
        ("at step 1, forward, blocks.0.mlp",),
        STRATEGY,
        {SPLIT: split(RowwiseParallel, without_sum), **UNSEEN},
    ),
    "column_without_sum": Plant(
        "the gradient behind a column-wise layer is not summed over the tensor ranks, and nobody looks",
        VIT,
        ("strategy=tp",),
        GRADIENT,
        STRATEGY,
        {SPLIT: split(ColwiseParallel, without_sum_backward), **UNSEEN},
    ),
    "tensor_degree": Plant(
        "the loss that goes backward is multiplied by the tensor ranks",
        VIT,
        ("strategy=ddp_tp",),
        GRADIENT,
        STRATEGY,
        {TIMES: lambda original: lambda x, factor: original(x, factor) * 2},
        FOUR,
    ),
    "summed_over_copies": Plant(
        "gradients are summed over the copies, not averaged",
        VIT,
        ("strategy=ddp_tp",),
        GRADIENT,
        STRATEGY,
        {f"{TENSOR}.average_gradients": summed_over_copies},
        FOUR,
    ),
    "own_copy": Plant(
        "the second copy begins with weights of its own",
        VIT,
        ("strategy=ddp_tp",),
        ("at initial values",),
        STRATEGY,
        {f"{TENSOR}.ShardedModel._load_values": own_copy},
        FOUR,
    ),
    "first_ranks_samples": Plant(
        "all data ranks read the samples of the first",
        VIT,
        ("strategy=mesh", "strategy.shard=2", "strategy.tensor=2"),
        ("at step 1, data, inputs",),
        STRATEGY,
        {"trainer.strategies.rank_context.RankContext.slice": first_rank},
        FOUR,
    ),
}
