"""One evaluation: the figures of a network over a whole set, unless somebody asks the run to stop meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.data.stream import EvaluationStream
from trainer.learning.task import Task
from trainer.loop.gathered_outputs import Rows, keeping
from trainer.loop.media_logging import NoShow
from trainer.loop.metric_checks import differing, refuse_metrics, shape_of
from trainer.refusal import Refusal, nearest
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import Placed

UNSEEN = NoShow()


def rehearse(
    strategy: Strategy,
    placed: Placed,
    task: Task,
    stream: EvaluationStream,
    wanted: Mapping[str, str],
    show: NoShow = UNSEEN,
) -> None:
    """Collective: evaluate one batch, so that what is wrong there shows now and not after an epoch.

    Refusal where a wanted figure, by the key that names it (checkpoint.best), is none of the task's; or where metrics
    are no sums.
    """
    refuse_metrics(placed, stream, strategy.world)
    figures = figures_of(strategy, placed, task, stream, range(1), show)
    for key, name in wanted.items():
        if (bare := name.removeprefix("-")) not in figures:
            averaged = bare.startswith("ema_") and not any(each.startswith("ema_") for each in figures)
            hint = "; those of a moving average come with ema.decay=0.999" if averaged else nearest(bare, figures)
            raise Refusal(f"{key}={name}: the task's metrics are {', '.join(figures)}{hint}")


def figures_of(
    strategy: Strategy, placed: Placed, task: Task, stream: EvaluationStream, at: Sequence[int], show: NoShow = UNSEEN
) -> dict[str, float]:
    """Collective: figures over some batches of a set, by their numbers."""
    figures: dict[str, float] = {}
    for prefix, weights in placed.average.views():
        sums: dict[str, Tensor | float] = {}
        with weights, torch.no_grad(), show.watching(placed, prefix) as through, keeping(placed) as kept:
            for batch, valid in kept.through(through(stream.batches(at))):
                _add(sums, placed.evaluate(batch, valid))
        figures |= _figures(task, strategy.totals(sums).read(), kept.read(strategy), prefix)
    return figures


def evaluate(
    strategy: Strategy,
    placed: Placed,
    task: Task,
    stream: EvaluationStream,
    asked: Callable[[], bool],
    show: NoShow = UNSEEN,
) -> dict[str, float] | None:
    """Collective: figures over the whole set, every sample counted once; None where a rank was asked to stop.

    Those of the weights, and of their moving average where there is one. RuntimeError where a sample was not counted
    once.
    """
    figures: dict[str, float] = {}
    votes = strategy.votes()
    for prefix, weights in placed.average.views():
        sums: dict[str, Tensor | float] = {}
        with weights, torch.no_grad(), show.watching(placed, prefix) as through, keeping(placed) as kept:
            for batch, valid in kept.through(through(stream.batches())):
                votes.ask(asked())  # travels while the batch computes; no GPU waits for it
                _add(sums, placed.evaluate(batch, valid))
                if any(votes.read()):
                    return None
        totals = strategy.totals(sums).read()
        if int(totals["samples"]) != stream.size:
            raise RuntimeError(f"evaluated {int(totals['samples'])} samples of a set of {stream.size}")
        rows = kept.read(strategy)
        figures |= _figures(task, totals, rows, prefix)
        show.totals(prefix, totals | rows)
    # what follows from them (the best, an early end, a rate) all must do alike: a task may draw at random, and tensor
    # ranks and stages add up each for themselves, in an order of their own
    return strategy.world.all_gather_values(figures)[0]  # all ranks, once an evaluation; the main rank's


def _add(sums: dict[str, Tensor | float], parts: Mapping[str, Tensor | float]) -> None:
    for name, part in parts.items():
        if name in sums and shape_of(sums[name]) != shape_of(part):
            raise ValueError(f"Task.metrics: {name} {differing(shape_of(sums[name]), shape_of(part))}")
        sums[name] = sums[name] + part if name in sums else part


def _figures(task: Task, totals: dict[str, Tensor], rows: dict[str, Rows], prefix: str) -> dict[str, float]:
    """The mean loss, and what the task makes of the totals, under names with this prefix."""
    if twice := sorted(totals.keys() & rows.keys()):
        raise Refusal(f"Task.gathered: {', '.join(twice)} is the name of a sum already; give it another one")
    loss = float(totals["loss"] / (totals["weight"] or 1))  # of nothing the mean is 0
    figures = {"loss": loss, **task.finish(totals | rows)}
    return {prefix + name: float(value) for name, value in figures.items()}
