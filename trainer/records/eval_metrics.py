"""The figures of evaluations: those that a run has logged, and which of two is better. Nothing here needs torch."""

import math
from collections.abc import Mapping
from typing import Any


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """What was measured, of a line of kind eval: not the step, nor the number of samples."""
    return {name: value for name, value in line.items() if isinstance(value, float)}


def score(figures: Mapping[str, Any] | None, best: str) -> float:
    """Larger is better: "accuracy" as it is, "-loss" negated; minus infinity where it is missing or not a number."""
    value = (figures or {}).get(best.removeprefix("-"))
    if not isinstance(value, (int, float)) or math.isnan(value):
        return -math.inf
    return -value if best.startswith("-") else value


def beside(best: str) -> str:
    """The loss of the network that a figure is of: of the weights, or of their moving average."""
    return "ema_loss" if best.removeprefix("-").startswith("ema_") else "loss"


def rank(figures: Mapping[str, Any] | None, best: str) -> tuple[float, float]:
    """What decides which of two evaluations is better, larger first: the figure, and where that is equal the loss."""
    first = score(figures, best)
    return first, score(figures, f"-{beside(best)}") if first > -math.inf else first
