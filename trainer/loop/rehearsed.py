"""Are a task's metrics sums? Their shape must not follow from how many samples a micro-batch has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.data.stream import EvaluationStream
from trainer.learning.task import Around, Task
from trainer.parallel.ranks import Ranks
from trainer.refusal import Refusal
from trainer.strategies.placed import Placed

Shape = tuple[int, ...]


class Measured(Around):
    """A task whose metrics keep the shapes that they have first; it remembers which ones would have had others."""

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._shapes: dict[str, Shape] | None = None
        self.differing: dict[str, tuple[Shape, Shape]] = {}

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
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
    whole, _ = next(iter(stream.batches(1)))
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
