"""One evaluation: the figures of a network over a whole set, unless somebody asks the run to stop meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainer.data.stream import EvaluationStream
from trainer.learning.task import Task
from trainer.refusal import Refusal, nearest
from trainer.strategies.base import Strategy
from trainer.strategies.placed import Placed


def rehearse(strategy: Strategy, placed: Placed, task: Task, stream: EvaluationStream, best: str) -> None:
    """Collective: evaluate one batch, so that what is wrong there shows now and not after an epoch.

    Refusal where `best`, the figure that marks the best checkpoint, is none of the task's.
    """
    sums: dict[str, Tensor | float] = {}
    with torch.no_grad():
        for batch, valid in stream.batches(1):
            _add(sums, placed.evaluate(batch, valid))
    figures, best = _figures(task, strategy.totals(sums).read()), best.removeprefix("-")
    if best not in figures:
        raise Refusal(f"checkpoint.best={best}: the task's figures are {', '.join(figures)}{nearest(best, figures)}")


def evaluate(
    strategy: Strategy, placed: Placed, task: Task, stream: EvaluationStream, asked: Callable[[], bool]
) -> dict[str, float] | None:
    """Collective: figures over the whole set, every sample counted once; None where a rank was asked to stop.

    RuntimeError where a sample was not counted once.
    """
    sums: dict[str, Tensor | float] = {}
    votes = strategy.votes()
    with torch.no_grad():
        for batch, valid in stream.batches():
            votes.ask(asked())  # travels while the batch computes; no GPU waits for it
            _add(sums, placed.evaluate(batch, valid))
            if any(votes.read()):
                return None
    totals = strategy.totals(sums).read()
    if int(totals["samples"]) != stream.size:
        raise RuntimeError(f"evaluated {int(totals['samples'])} samples of a set of {stream.size}")
    return _figures(task, totals)


def _add(sums: dict[str, Tensor | float], parts: Mapping[str, Tensor | float]) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part


def _figures(task: Task, totals: dict[str, Tensor]) -> dict[str, float]:
    """The mean loss, and what the task makes of the totals."""
    loss = float(totals["loss"] / (totals["weight"] or 1))  # of nothing the mean is 0
    return {"loss": loss, **{name: float(value) for name, value in task.finish(totals).items()}}
