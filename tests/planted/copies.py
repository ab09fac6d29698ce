"""Mistakes of the program where each rank has all of the network: single, dp, ddp, zero1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from tests.planted.networks import rank
from tests.planted.plant import NET, STRATEGY, Change, Plant
from trainer.parallel.gradient_clipping import global_norm
from trainer.parallel.ranks import Ranks

SYNC = "trainer.strategies.ddp.DDPModel.grad_sync_context"
LEARN = "trainer.strategies.parallel_model.ParallelModel.run_micro_batches"
SHARES = "trainer.strategies.parallel_model.loss_shares"
TIMES = "trainer.strategies.parallel_model.scale_loss"


def other_batches(choose: Any) -> Change:
    """A step learns from other micro-batches than it is given."""
    return lambda original: lambda self, batches, *rest: original(self, choose(batches), *rest)


def others_targets(batches: list[Any]) -> list[Any]:
    return [one._replace(targets=batches[at - 1].targets) for at, one in enumerate(batches)]


def undivided(original: Any) -> Any:
    """The share of each micro-batch is that of a lone one."""

    def shares(task: Any, batches: list[Any], *place: Any) -> Any:
        share = original(task, batches, *place)
        return lambda index: share(index) * len(batches)

    return shares


def alike(original: Any) -> Any:
    """Micro-batches count alike, whatever they weigh."""
    return lambda task, batches, ranks, device: lambda index: 1 / (len(batches) * ranks.size)


def own_weights(original: Any) -> Any:
    """Each rank divides by the weight of its own samples."""

    def shares(task: Any, batches: list[Any], ranks: Ranks, device: Any) -> Any:
        share = original(task, batches, Ranks(), device)
        return lambda index: share(index) / ranks.size

    return shares


def half_learned(original: Any) -> Any:
    """The second replica computes, and its gradient is lost."""

    def replicas(self: Any, whole: Any) -> Any:
        def forward(inputs: Tensor, targets: Tensor) -> Tensor:
            half = len(inputs) // 2
            with torch.no_grad():
                second = whole(inputs[half:], targets[half:])
            return torch.cat([whole(inputs[:half], targets[:half]), second])

        return forward

    return replicas


def kept_gradients(original: Any) -> Any:
    """A tenth of each gradient stays for the next step."""

    def optimizer_step(self: Any, *args: Any) -> Any:
        before = {one: one.grad.clone() for one in self.network.parameters() if one.grad is not None}
        norm = original(self, *args)
        for parameter, gradient in before.items():
            parameter.grad = 0.1 * gradient
        return norm

    return optimizer_step


def in_bf16(original: Any) -> Any:
    """Gradients travel in bf16."""

    def wrap(self: Any) -> Any:
        forward = original(self)
        self._replica.register_comm_hook(self.strategy.world.group, bf16_compress_hook)
        return forward

    return wrap


def in_bf16_of_fp32(original: Any) -> Any:
    """The same in zero1, where gradients are fp32."""

    def send(self: Any, bucket: Any) -> None:
        for one in bucket.parameters:
            if one.grad is not None and one.grad.dtype == torch.float32:
                one.grad.copy_(one.grad.bfloat16())
        original(self, bucket)

    return send


def accumulated_in_bf16(original: Any) -> Any:
    """Between two micro-batches gradients are rounded to bf16."""

    def begin(self: Any, *args: Any) -> Any:
        for one in self.network.parameters():
            if one.grad is not None:
                one.grad.copy_(one.grad.bfloat16())
        return original(self, *args)

    return begin


def own_values(original: Any) -> Any:
    """Rank 1 does not take over what rank 0 begins with."""

    def arrived(self: Any, network: Any) -> Any:
        network = original(self, network)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + 1e-3 * rank())
        return network

    return arrived


def local_gather(ctx: Any, *grads: Tensor) -> Any:
    """What other ranks' losses have made of these rows is lost."""
    return grads[0].contiguous()[ctx.local], None, None


MICRO = "loop.micro_batches=2"
GRADIENT, LOSS = ("at step 1, gradient",), ("at step 1, loss",)
PLANTS = {
    "dropped_micro_batch": Plant(
        "the last micro-batch is left out",
        NET,
        ("strategy=single", "loop.micro_batches=3"),
        LOSS,
        STRATEGY,
        {LEARN: other_batches(lambda batches: batches[:-1] or batches)},
        size=1,
    ),
    "doubled_micro_batch": Plant(
        "the first micro-batch is learned twice, the last one not",
        NET,
        ("strategy=ddp", MICRO),
        LOSS,
        STRATEGY,
        {LEARN: other_batches(lambda batches: [*batches[:-1], batches[0]])},
    ),
    "swapped_targets": Plant(
        "each micro-batch has the targets of its neighbour",
        NET,
        ("strategy=fsdp", MICRO),
        LOSS,
        STRATEGY,
        {LEARN: other_batches(others_targets)},
    ),
    "undivided_loss": Plant(
        "the loss is not divided by the number of micro-batches (nanoGPT#168, transformers#35438)",
        NET,
        ("strategy=single", MICRO),
        LOSS,
        STRATEGY,
        {SHARES: undivided},
        size=1,
    ),
    "alike_micro_batches": Plant(
        "micro-batches count alike, whatever they weigh (OpenNMT-py#2209)",
        (*NET, "task=weighted"),
        ("strategy=ddp", MICRO),
        LOSS,
        STRATEGY,
        {SHARES: alike},
    ),
    "own_weights": Plant(
        "each rank divides by the weight of its own samples (NeMo Automodel#3830)",
        (*NET, "task=weighted"),
        ("strategy=zero1",),
        LOSS,
        STRATEGY,
        {SHARES: own_weights},
    ),
    "summed_gradients": Plant(
        "gradients are not multiplied back after the mean over ranks",
        NET,
        ("strategy=ddp", MICRO),
        GRADIENT,
        STRATEGY,
        {TIMES: lambda original: lambda x, _: x},
    ),
    "half_learned": Plant(
        "the gradient of the second replica is lost",
        NET,
        ("strategy=dp",),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.dp.DP.replicas": half_learned},
        size=1,
    ),
    "kept_gradients": Plant(
        "a step begins with a part of the gradients of the last one",
        NET,
        ("strategy=single", MICRO),
        ("at step 2, gradient",),  # the one that follows the save, before the second part begins anew
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.optimizer_step": kept_gradients},
        size=1,
    ),
    "never_synced": Plant(
        "gradients stay on their rank",
        NET,
        ("strategy=ddp",),
        GRADIENT,
        STRATEGY,
        {
            "trainer.strategies.ddp.DDPModel.grad_sync_context": lambda original: (
                lambda self, last: self._replica.no_sync()
            )
        },
    ),
    "first_synced": Plant(
        "the gradients of the first micro-batch travel, not those of the last",
        NET,
        ("strategy=ddp", MICRO),
        GRADIENT,
        STRATEGY,
        {
            "trainer.strategies.ddp.DDPModel.grad_sync_context": lambda original: (
                lambda self, last: original(self, not last)
            )
        },
    ),
    "reduced_in_bf16": Plant(
        "gradients travel in bf16",
        NET,
        ("strategy=ddp",),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.ddp.DDPModel.wrap": in_bf16},
    ),
    "reduced_in_bf16_of_fp32": Plant(
        "gradients travel in bf16, in a run in fp32 alone",
        (*NET, "precision=fp32"),
        ("strategy=zero1",),
        ("in its precision",),
        STRATEGY,
        {"trainer.parallel.parameter_owners.GradientReducer._send": in_bf16_of_fp32},
    ),
    "accumulated_in_bf16": Plant(
        "gradients are added up over micro-batches in bf16",
        NET,
        ("strategy=ddp", MICRO),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.share_of_loss": accumulated_in_bf16},
    ),
    "own_values": Plant(
        "rank 1 begins with weights of its own",
        NET,
        ("strategy=ddp",),
        ("at initial values, embed.weight, rank 1",),
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.materialize": own_values},
    ),
    "local_gather": Plant(
        "the backward of `gather` does not add up what other ranks found",
        (*NET, "task=contrast"),
        ("strategy=ddp",),
        GRADIENT,
        STRATEGY,
        {"trainer.parallel.batch_gather._Gather.backward": lambda original: local_gather},
    ),
    "stale_broadcast": Plant(
        "parameters of one owner are not sent after the step",
        NET,
        ("strategy=zero1",),
        ("at step 1, optimizer step", "at step 1, update"),
        STRATEGY,
        {
            "trainer.strategies.zero1.broadcast_from_owners": lambda original: (
                lambda buckets, ranks: original(buckets[1:], ranks)
            )
        },
    ),
    "summed_at_owner": Plant(
        "an owner gets the sum of gradients, not their mean",
        NET,
        ("strategy=zero1",),
        GRADIENT,
        STRATEGY,
        {
            "trainer.parallel.parameter_owners._set_gradients": lambda original: (
                lambda bucket, flat, used: original(bucket, flat * 2, used)
            )
        },
    ),
    "own_norm": Plant(
        "the norm is that of what a rank owns (torchtitan#766)",
        (*NET, "loop.max_norm=0.1"),
        ("strategy=zero1",),
        ("at step 1, norm",),
        STRATEGY,
        {
            "trainer.strategies.zero1.Zero1Model.grad_norm": lambda original: (
                lambda self, gradients: global_norm(gradients)
            )
        },
    ),
}
