"""Mistakes of the program in clipping, rates, moments, averages and BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.planted.copies import GRADIENT
from tests.planted.networks import rank
from tests.planted.plant import NET, STRATEGY, VIT, Plant
from tests.planted.shards import CLIPPED, FOUR
from trainer.parallel.gradient_clipping import global_norm

RATES = "trainer.loop.trainer.set_rates"
SYNCED = (*NET, "+model.kind=batch_norm")
SYNC = "strategy.sync_bn=true"
CLIP = "trainer.strategies.parallel_model.clip_gradients_"
RATE = ("at step 1, learning rate", *CLIPPED[1:])


def all_used(original: Any) -> Any:
    """Zeros that stand for no gradient are taken for one."""
    return lambda bucket, flat, used: original(bucket, flat, {*bucket.parameters})


def no_autocast(original: Any) -> Any:
    """One rank computes in the precision of its parameters."""
    return lambda self, device: nullcontext() if rank() else original(self, device)


def each_clipped(original: Any) -> Any:
    """Each gradient is clipped by its own norm."""

    def clip(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        for gradient in gradients:
            original([gradient], global_norm([gradient]), max_norm)

    return clip


def first_rate(original: Any) -> Any:
    """The rate of the first group alone follows the schedule."""

    def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> float:
        optimizer.param_groups[0]["lr"] = rates[0] * factor
        return rates[0] * factor

    return set_rates


def other_decay(original: Any) -> Any:
    return lambda network, decay, every: original(network, decay - 0.01 * rank(), every)


def other_scale(original: Any) -> Any:
    """One rank undoes another scale than that of the loss."""

    def unscale(self: Any, parameters: list[Any]) -> None:
        original(self, parameters)
        for one in parameters:
            if one.grad is not None:
                one.grad.mul_(1 + rank())

    return unscale


def moved_variance(original: Any) -> Any:
    """One rank corrects the running variance by its own number of samples."""

    def batch_norm(ranks: Any, x: Tensor, running_mean: Any, running_var: Any, *rest: Any, **more: Any) -> Tensor:
        y = original(ranks, x, running_mean, running_var, *rest, **more)
        running_var.mul_(1 + 1e-3 * rank())
        return y

    return batch_norm


PLANTS = {
    "doubled_norm": Plant(
        "the norm that is clipped by is twice the true one",
        (*NET, "loop.max_norm=0.1"),
        ("strategy=ddp",),
        ("at step 1, norm",),
        STRATEGY,
        {"trainer.strategies.parallel_model.global_norm": lambda original: lambda gradients: 2 * original(gradients)},
    ),
    "unclipped": Plant(
        "the norm is right, and nothing is clipped (transformers#46113)",
        (*NET, "loop.max_norm=0.1"),
        ("strategy=fsdp",),
        CLIPPED,
        (*STRATEGY, "clipping"),
        {CLIP: lambda original: lambda *_: None},
    ),
    "each_clipped": Plant(
        "each gradient is clipped by its own norm",
        (*NET, "loop.max_norm=0.1"),
        ("strategy=ddp",),
        CLIPPED,
        (*STRATEGY, "clipping"),
        {CLIP: each_clipped},
    ),
    "scaled_rates": Plant(
        "the learning rate is multiplied by the number of processes",
        NET,
        ("strategy=ddp",),
        RATE,
        STRATEGY,
        {
            RATES: lambda original: (
                lambda optimizer, rates, factor: original(optimizer, rates, factor * dist.get_world_size())
            )
        },
    ),
    "first_rate": Plant(
        "one group of parameters does not follow the schedule",
        (*VIT, "schedule.warmup=2"),
        ("strategy=fsdp_tp",),
        RATE,
        STRATEGY,
        {RATES: first_rate},
        FOUR,
    ),
    "other_decay": Plant(
        "the moving average of one rank moves faster",
        (*NET, "ema.decay=0.9"),
        ("strategy=ddp",),
        ("at step 2, update, ema/",),
        STRATEGY,
        {"trainer.strategies.parallel_model.MovingAverage": other_decay},
    ),
    "other_scale": Plant(
        "one rank undoes another loss scale, in fp16 alone",
        (*NET, "precision=fp16"),
        ("strategy=ddp",),
        ("in its precision",),
        STRATEGY,
        {"trainer.strategies.loss_scaler.Scaler.unscale_": other_scale},
    ),
    "zeros_for_unused": Plant(
        "a parameter that no sample uses gets a gradient of zeros, and is decayed",
        (*NET, "+model.kind=spare"),
        ("strategy=zero1",),
        ("at step 1, gradient, middle.spare.",),
        STRATEGY,
        {"trainer.parallel.parameter_owners._set_gradients": all_used},
        why="what no sample has used",
    ),
    "no_autocast": Plant(
        "one rank computes in fp32 where the run is in bf16",
        (*NET, "precision=bf16"),
        ("strategy=ddp",),
        ("in its precision",),
        STRATEGY,
        {"trainer.strategies.machine.Machine.autocast": no_autocast},
    ),
    "local_statistics": Plant(
        "strategy.sync_bn=true has no effect",
        SYNCED,
        ("strategy=ddp", SYNC),
        ("at step 1, forward, middle",),
        STRATEGY,
        {"trainer.strategies.parallel_model.synchronise_batch_norms": lambda original: lambda network, *_: network},
    ),
    "local_statistics_backward": Plant(
        "the backward of synchronised statistics is that of one rank",
        SYNCED,
        ("strategy=fsdp", SYNC),
        GRADIENT,
        STRATEGY,
        {
            "trainer.parallel.batch_norm._AllReduce.backward": lambda original: (
                lambda ctx, gradient: (
                    gradient.contiguous().clone(),
                    None,
                )
            )
        },
    ),
    "moved_variance": Plant(
        "the running variance of one rank is corrected by another number of samples",
        SYNCED,
        ("strategy=zero1", SYNC),
        ("at step 1, update, middle.running_var",),
        STRATEGY,
        {"trainer.parallel.batch_norm.batch_norm_over_ranks": moved_variance},
    ),
}
