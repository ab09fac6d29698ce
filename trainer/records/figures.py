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
