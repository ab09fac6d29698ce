"""Mistakes of the program that others made: what an evaluation leaves behind, what guards of a run would hide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.planted.copies import GRADIENT, MICRO
from tests.planted.networks import rank
from tests.planted.plant import DROPOUT, GPT, NET, STRATEGY, Plant
from tests.planted.restarts import LAST, RESUME
from tests.planted.shards import FOUR
from tests.planted.steps import RATE, SYNC, SYNCED
from trainer.strategies.fsdp import FSDPModel as PlacedShards

_PLATEAU = ("schedule=plateau", "schedule.patience=0", "schedule.threshold=0.9")


def evaluation_mode(original: Any) -> Any:
    """Once a network is in evaluation mode it stays there."""
    return lambda self, training: original(self, training and self.network.training)


def kept_average(original: Any) -> Any:
    """The average goes into the network, and the weights never come back."""

    @contextmanager
    def in_place(self: Any, names: Any) -> Iterator[None]:
        with torch.no_grad():
            for name in names if self._averages else ():
                self._tensors[name].copy_(self._averages[name])
        yield

    return in_place


def half_scale(original: Any) -> Any:
    """What one rank reads of the scale is half of it. The proof itself gives a scale without what is counted."""

    def load(self: Any, state: Mapping[str, Tensor]) -> None:
        original(self, state)
        if "scaler/good" in state:
            self._scale = self._scale / (1 + rank())

    return load


def ungrouped(original: Any) -> Any:
    """The groups of parameters become one, with the words of the first."""

    def optimizer(self: Any, make: Any, groups: Any) -> Any:
        return original(self, make, [{"params": [one for group in groups for one in group["params"]]}])

    return optimizer


def once_more(original: Any) -> Any:
    """The moving average follows the weights twice in a step."""

    def after_step(self: Any, step: int) -> None:
        original(self, step)
        if isinstance(self, PlacedShards):
            self.average.update(step, 0.0)

    return after_step


def decayed_twice(original: Any) -> Any:
    """What is spread is decayed before the step, which decays it, too."""

    def optimizer_step(self: Any, optimizer: Any, *rest: Any) -> Any:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    one.mul_(1 - group["lr"] * group["weight_decay"])
        return original(self, optimizer, *rest)

    return optimizer_step


class Hurried:
    """A schedule that is asked for the number of micro-batches."""

    def __init__(self, schedule: Any, count: int) -> None:
        self._schedule, self._count = schedule, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        return self._schedule(step * self._count, epoch, horizon)


def by_micro_batch(original: Any) -> Any:
    """The schedule goes on with each micro-batch."""

    def train_step(self: Any, batches: Any) -> Any:
        schedule = self.schedule
        self.schedule = Hurried(schedule, len(batches))
        try:
            return original(self, batches)
        finally:
            self.schedule = schedule

    return train_step


def first_stage_trains(original: Any) -> Any:
    """Of the stages of a rank the first is never in evaluation mode."""

    def train(self: Any, mode: bool = True) -> Any:
        nn.Module.train(self, mode)
        next(self.children()).train(True)
        return self

    return train


def local_variance(original: Any) -> Any:
    """The running variance is corrected by the samples of one rank."""

    def batch_norm(ranks: Any, x: Tensor, mean: Any, variance: Any, *rest: Any, **more: Any) -> Tensor:
        before, rows = variance.clone(), x.numel() / x.shape[1]
        y = original(ranks, x, mean, variance, *rest, **more)
        whole = rows * ranks.size
        variance.sub_(0.9 * before).mul_((whole - 1) / whole * rows / max(rows - 1, 1)).add_(0.9 * before)
        return y

    return batch_norm


def vectors_apart(original: Any) -> Any:
    """Biases and norms are not averaged over the copies."""
    return lambda parameters, *rest: original([one for one in parameters if one.dim() > 1], *rest)


def weighed_by_ranks(original: Any) -> Any:
    """The loss of an evaluation is not divided by the context ranks that have counted it."""

    def evaluate(self: Any, *given: Any) -> Any:
        sums = original(self, *given)
        return sums | {"loss": sums["loss"] * self.strategy.context_group.size}

    return evaluate


def own_positions(original: Any) -> Any:
    """A context rank takes its two pieces for neighbours."""

    def call(self: Any, forward: Any, mesh: Any, own: int, *args: Any, **more: Any) -> Any:
        places, size = args[self._argument], args[0].shape[self._dim]
        return forward(*args[: self._argument], places + own * size, *args[self._argument + 1 :], **more)

    return call


def first_stages_norm(original: Any) -> Any:
    """Each stage clips by its own norm."""
    return lambda self, gradients: super(type(self), self).grad_norm(gradients)


PLANTS = {
    "stays_in_evaluation": Plant(
        "after an evaluation the network stays in evaluation mode",
        (*NET, "+model.kind=in_place"),
        ("strategy=ddp",),
        ("at step 1, forward, middle",),
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.set_mode": evaluation_mode},
    ),
    "kept_average": Plant(
        "after an evaluation the network keeps the average as its weights",
        (*NET, "ema.decay=0.5"),
        ("strategy=fsdp",),
        ("at step 3, forward", "at step 1, resume"),
        STRATEGY,
        {"trainer.strategies.ema.MovingAverage._in_place": kept_average},
    ),
    "lost_plateau": Plant(
        "what schedule=plateau has counted is not read",
        (*NET, *_PLATEAU),
        ("strategy=ddp",),
        ("at step 3, learning rate", "at step 2, learning rate"),
        RESUME,
        {"trainer.learning.schedule.Plateau.load": lambda original: lambda *_: None},
    ),
    "half_scale": Plant(
        "one rank reads half the scale of fp16 from the checkpoint",
        (*NET, "precision=fp16"),
        ("strategy=ddp",),
        ("in its precision",),
        STRATEGY,
        {"trainer.strategies.loss_scaler.Scaler.load": half_scale},
    ),
    "ungrouped": Plant(
        "biases are stepped as weights are: the optimizer's groups are lost",
        (*NET, "optimizer.weight_decay=0.1"),
        ("strategy=zero1",),
        RATE,
        STRATEGY,
        {"trainer.strategies.zero1.Zero1Model.optimizer": ungrouped},
    ),
    "average_twice": Plant(
        "the moving average follows twice in each step",
        (*NET, "ema.decay=0.9"),
        ("strategy=fsdp",),
        ("at step 2, update, ema/", "at step 1, update, ema/"),
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.after_step": once_more},
    ),
    "decayed_twice": Plant(
        "shards are decayed twice",
        (*NET, "optimizer.weight_decay=0.1"),
        ("strategy=fsdp",),
        ("at step 1, optimizer step",),
        STRATEGY,
        {"trainer.strategies.sharded_model.ShardedModel.optimizer_step": decayed_twice},
    ),
    "rate_by_micro_batch": Plant(
        "the schedule goes on with each micro-batch",
        NET,
        ("strategy=ddp", MICRO),
        ("at step 2, learning rate",),
        STRATEGY,
        {"trainer.loop.trainer.Trainer.train_step": by_micro_batch},
    ),
    "single_numbers": Plant(
        "a single number, which stays whole, is not averaged",
        (*NET, "+model.kind=twice"),
        ("strategy=fsdp",),
        ("at step 1, gradient, middle.gain",),
        STRATEGY,
        {"trainer.strategies.sharded_model.average_gradients": lambda original: lambda *_: None},
    ),
    "sequence_norms": Plant(
        "the gradients of norms between split tokens are not summed over the tensor ranks",
        (*GPT, "model.sequence=true"),
        ("strategy=tp",),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.sharded_model.redistribute_gradients": lambda original: lambda *_: None},
    ),
    "norm_along_one_axis": Plant(
        "squares of shards are added up along one axis alone",
        (*GPT, "loop.max_norm=0.1"),
        ("strategy=fsdp_tp",),
        ("at step 1, norm",),
        STRATEGY,
        {"trainer.parallel.gradient_clipping.split_axes": lambda original: lambda tensor: original(tensor)[:1]},
        FOUR,
    ),
    "vectors_apart": Plant(
        "biases and norms are not averaged over the copies",
        GPT,
        ("strategy=ddp_tp",),
        GRADIENT,
        STRATEGY,
        {"trainer.strategies.sharded_model.average_gradients": vectors_apart},
        FOUR,
    ),
    "stages_norm": Plant(
        "each stage of a pipeline clips by its own norm",
        (*GPT, "loop.max_norm=0.1"),
        ("strategy=pp", MICRO),
        ("at step 1, norm",),
        STRATEGY,
        {"trainer.strategies.pipeline_model.PipelineModel.grad_norm": first_stages_norm},
    ),
    "first_stage_trains": Plant(
        "a stage is evaluated in training mode",
        (*GPT, DROPOUT),
        ("strategy=pp", MICRO),
        LAST,
        STRATEGY,
        {"trainer.parallel.pipeline.stages.RankStages.train": first_stage_trains},
    ),
    "own_positions": Plant(
        "a context rank takes its two pieces for neighbours",
        (*GPT, "model.rotary=10000"),
        ("strategy=cp",),
        ("at step 1, forward, blocks.0.attention",),
        STRATEGY,
        {"trainer.parallel.context_parallel.ShiftedPlaces._call": own_positions},
    ),
    "evaluated_by_context": Plant(
        "the loss of an evaluation is multiplied by the context ranks",
        GPT,
        ("strategy=cp",),
        LAST,
        STRATEGY,
        {"trainer.strategies.sharded_model.ContextParallelModel.evaluate_batch": weighed_by_ranks},
    ),
    "local_variance": Plant(
        "the running variance is corrected by the samples of one rank",
        SYNCED,
        ("strategy=ddp", SYNC),
        ("at step 1, update, middle.running_var",),
        STRATEGY,
        {"trainer.parallel.batch_norm.batch_norm_over_ranks": local_variance},
    ),
}
