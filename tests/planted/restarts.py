"""Mistakes of the program in saving and resuming, and in evaluating."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.planted.copies import MICRO
from tests.planted.networks import rank
from tests.planted.plant import DROPOUT, NET, STRATEGY, VIT, Plant
from tests.planted.shards import FOUR
from tests.planted.steps import SYNC, SYNCED
from trainer.parallel.device_mesh import to_local

RESUME = (*STRATEGY, "the resume")
EVALUATION = (*STRATEGY, "the evaluation")
RESTORE = "trainer.strategies.parallel_model.restore_optimizer"
LAST = ("at step 3, evaluation",)


def lost_moment(original: Any) -> Any:
    """One of the optimizer's moments begins as zeros."""

    def restore(network: Any, optimizer: Any, state: Mapping[str, Tensor]) -> None:
        lost = {name: torch.zeros_like(one) for name, one in state.items() if name.endswith("/exp_avg_sq")}
        original(network, optimizer, {**state, **lost})

    return restore


def lost_position(original: Any) -> Any:
    """An epoch begins again where it is resumed."""

    def resume(self: Any, found: Any) -> None:
        original(self, found)
        self.progress.position = 0

    return resume


def first_shards(original: Any) -> Any:
    """One rank does not read its piece of the first tensor."""

    def read_into(tensors: dict[str, Tensor], found: Any) -> None:
        original(tensors, found)
        if rank() == 1:
            to_local(next(iter(tensors.values()))).zero_()

    return read_into


def left_in_evaluation(original: Any) -> Any:
    """The network stays in evaluation mode after a pass over the evaluation set, and is saved so."""

    def compute(strategy: Any, model: Any, *rest: Any) -> Any:
        totals = original(strategy, model, *rest)
        model.set_mode(training=False)
        return totals

    return compute


def kept_buffers(original: Any) -> Any:
    """Buffers stay what they were when the process began."""

    def load_weights(self: Any, state: Mapping[str, Tensor]) -> None:
        before = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        original(self, state)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(before[name])

    return load_weights


def emptied(original: Any) -> Any:
    """A save gives the checkpoint the memory of one rank's optimizer, and leaves it none."""

    def state(self: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().clone() for name, tensor in original(self, optimizer).items()}
        for memory in optimizer.state.values() if rank() else ():
            memory["exp_avg"].zero_()
        return tensors

    return state


def average_stays(original: Any) -> Any:
    """After a save the moving average stands in the place of the weights."""

    @torch.no_grad()
    def state(self: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().clone() for name, tensor in original(self, optimizer).items()}
        for name, parameter in self.network.named_parameters():
            parameter.copy_(tensors.get(f"ema/{name}", parameter))
        return tensors

    return state


def plain_views(original: Any) -> Any:
    """The average is evaluated with the weights in its place."""

    def views(self: Any) -> Iterator[Any]:
        for prefix, _ in original(self):
            yield prefix, nullcontext()

    return views


PLANTS = {
    "no_restore": Plant(
        "the optimizer's memory is not read",
        NET,
        ("strategy=ddp",),
        ("at step 1, resume, optimizer/",),
        RESUME,
        {RESTORE: lambda original: lambda *_: None},
    ),
    "lost_moment": Plant(
        "one of the optimizer's moments is not read",
        NET,
        ("strategy=fsdp",),
        ("at step 1, resume, optimizer/",),
        RESUME,
        {RESTORE: lost_moment},
    ),
    "saved_in_evaluation": Plant(
        "a network is saved in evaluation mode, in which its weights are merged",
        (*NET, "+model.kind=merging"),
        ("strategy=ddp",),
        ("at step 1, resume, middle.weight",),
        RESUME,
        {"trainer.loop.evaluation._compute_totals": left_in_evaluation},
    ),
    "aliased_save": Plant(
        "an asynchronous save writes what the next step changes",
        NET,
        ("strategy=ddp",),
        ("at step 1, resume, ",),
        RESUME,
        {
            "trainer.records.checkpoint.writer.AsyncSaver.snapshot": lambda original: (
                lambda self, tensors: {name: to_local(one.detach()) for name, one in tensors.items()}
            )
        },
    ),
    "emptied_by_save": Plant(
        "a save leaves one rank's optimizer without its memory; the checkpoint is right",
        NET,
        ("strategy=zero1",),
        ("at step 2, optimizer step",),
        RESUME,
        {"trainer.strategies.parallel_model.ParallelModel.state": emptied},
        why="what it saves or reads for the resume",
    ),
    "average_after_save": Plant(
        "after a save the network keeps the average as its weights; the checkpoint is right",
        (*NET, "ema.decay=0.9"),
        ("strategy=fsdp",),
        ("at step 3, forward, embed",),
        STRATEGY,
        {"trainer.strategies.parallel_model.ParallelModel.state": average_stays},
        why="what it makes of this forward",
    ),
    "lost_position": Plant(
        "the place in the epoch is lost where it is resumed",
        NET,
        ("strategy=fsdp",),
        ("at step 2, data, inputs",),
        RESUME,
        {"trainer.loop.trainer.Trainer.resume": lost_position},
    ),
    "lost_average": Plant(
        "the moving average is not read",
        (*NET, "ema.decay=0.9"),
        ("strategy=zero1",),
        ("at step 1, resume, ema/",),
        RESUME,
        {"trainer.strategies.ema.MovingAverage.load": lambda original: lambda *_: None},
    ),
    "unread_shard": Plant(
        "one rank does not read its piece of a tensor",
        VIT,
        ("strategy=fsdp_pp", MICRO),
        ("at step 1, resume, ",),
        RESUME,
        {"trainer.records.checkpoint.tensor_files.load_tensors": first_shards},
        FOUR,
    ),
    "kept_buffers": Plant(
        "running statistics are not read",
        SYNCED,
        ("strategy=ddp", SYNC),
        ("at step 1, resume, middle.running",),
        RESUME,
        {"trainer.strategies.parallel_model.ParallelModel.load_weights": kept_buffers},
    ),
    "evaluated_in_training": Plant(
        "one rank evaluates in training mode",
        (*VIT, DROPOUT),
        ("strategy=ddp",),
        LAST,
        EVALUATION,
        {
            "trainer.strategies.parallel_model.ParallelModel.set_mode": lambda original: (
                lambda self, training: original(self, training or rank() == 1)
            )
        },
    ),
    "counted_padding": Plant(
        "a rank without a sample of the last batch counts the one that it computes",
        (*NET, "data=odd", "loop.eval_batch=24"),
        ("strategy=ddp",),
        LAST,
        EVALUATION,
        {"trainer.strategies.parallel_model.zero_sums": lambda original: lambda sums: sums},
    ),
    "last_batch": Plant(
        "the last batch of an evaluation is left out where it is not full",
        (*NET, "data=odd", "loop.eval_batch=24"),
        ("strategy=fsdp",),
        LAST,
        EVALUATION,
        {"trainer.data.loader.EvalLoader.__len__": lambda original: lambda self: self.size // self._global_batch},
    ),
    "plain_views": Plant(
        "figures of the moving average are those of the weights",
        (*VIT, "ema.decay=0.9"),
        ("strategy=tp",),
        LAST,
        EVALUATION,
        {"trainer.strategies.ema.MovingAverage.views": plain_views},
    ),
    "rank_by_rank": Plant(
        "what an evaluation keeps of each sample comes rank by rank, not in the order of the set",
        (*NET, "task=ranked"),
        ("strategy=zero1",),
        LAST,
        EVALUATION,
        {
            "trainer.loop.evaluation.GatheringTask._join_rows": lambda original: (
                lambda self, name, parts, order: original(self, name, parts, torch.arange(len(order)))
            )
        },
    ),
}
