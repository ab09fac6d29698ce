"""Are a task's metrics sums, and does its loss take what a network gives in an evaluation? One look at the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.data.stream import EvaluationStream
from trainer.learning.task import Around, Task, innermost, lists_samples
from trainer.parallel.ranks import Ranks
from trainer.refusal import Refusal, first_line
from trainer.strategies.parallel_model import Placed

Shape = tuple[int, ...]


class Measured(Around):
    """A task whose metrics keep the shapes that they have first; it remembers which ones would have had others."""

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._shapes: dict[str, Shape] | None = None
        self.differing: dict[str, tuple[Shape, Shape]] = {}

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        with self._lists_explained("loss", output):
            loss = self.inner.loss(output, target)
            if lists_samples(loss):
                raise TypeError("it returned that list")
        return loss

    @contextmanager
    def _lists_explained(self, method: str, output: Any) -> Iterator[None]:
        """Refusal where a method fails on a list with a dict for each sample, as detection networks give."""
        try:
            yield
        except Exception as error:
            if not lists_samples(output):
                raise
            keys = [str(key) for key in output[0]]
            raise Refusal(
                f"{type(innermost(self)).__name__}.{method} fails in an evaluation ({type(error).__name__}:"
                f" {first_line(error)}): there the network's output is a list with a dict for each sample"
                f" ({', '.join(keys)}), and no loss. Write for example: def loss(self, output, target): return output"
                f' if isinstance(output, dict) else output[0]["{keys[0]}"].new_zeros(()). Figures of such lists come'
                " from gathered(output, target) and finish(totals): docs/extending.md, and the lab"
                " tests/labs/detection"
            ) from error

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        with self._lists_explained("metrics", output):
            sums = self.inner.metrics(output, target)
        shapes = {name: shape_of(value) for name, value in sums.items()}
        if self._shapes is None:
            self._shapes = shapes
        if self._shapes.keys() != shapes.keys():
            raise ValueError(f"Task.metrics gave {sorted(self._shapes)}, and then {sorted(shapes)}")
        pairs = {name: (shape, shapes[name]) for name, shape in self._shapes.items()}
        self.differing |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        # until all ranks have been told: of a pipeline nobody could receive other shapes
        return {name: torch.zeros(pairs[name][0]) if name in self.differing else sums[name] for name in pairs}


def refuse_metrics(placed: Placed, stream: EvaluationStream, ranks: Ranks) -> None:
    """Collective: Refusal where the metrics of one sample have another shape than those of a micro-batch."""
    whole, _ = next(iter(stream.batches(range(1))))
    inner, placed.task = placed.task, (task := Measured(placed.task))
    try:
        with torch.no_grad():
            for batch in (whole, stream.first()):
                placed.evaluate(batch, 1)
    finally:
        placed.task = inner
    heard = ranks.all_gather_values(task.differing)  # all ranks, once; as a rule nothing
    for name, shapes in (pair for rank in heard for pair in rank.items()):
        raise Refusal(f"Task.metrics: {name} {differing(*shapes)}")


def shape_of(value: Tensor | float) -> Shape:
    """Of a number it is ()."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def differing(first: Shape, other: Shape) -> str:
    """What is wrong with two shapes of one sum, and what works."""
    return (
        f"has the shape {first} in one micro-batch and {other} in another. Metrics are added up, so they must be sums"
        " over the samples. For figures that need every prediction (AUC, mAP) a task has gathered(output, target), see"
        " docs/extending.md"
    )
