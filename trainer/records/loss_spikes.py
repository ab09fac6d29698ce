"""A loss that jumps: worth a word, for a batch with wrong labels or a rate that is too high shows so first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_WINDOW = 50  # lines that a jump is compared with
_FAR = 8.0  # robust standard deviations
_SIGMA = 1.4826  # of a normal distribution, per median absolute deviation


class Spikes:
    """Tells a jump of the loss, once: above all of the last 50 lines, by a step far larger than theirs.

    Steps from line to line are compared, and not losses: those fall, and lie wide apart while a run learns fast.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW + 1)  # of the lines before

    def look(self, step: int, loss: float) -> list[str]:
        """The loss of the next line; a sentence where it has jumped."""
        before = [*self._losses]
        if not math.isfinite(loss):  # which the run does not survive
            return []
        self._losses.append(loss)
        # what stays up is told once: it is no new height then
        if len(before) < _WINDOW or loss <= max(before):
            return []
        # small losses differ by factors, so their logarithms must have jumped as well: one hard sample is no spike
        losses = [*before, loss]
        far = _jump(losses) if min(losses) <= 0 else min(_jump(losses), _jump([math.log(each) for each in losses]))
        if far <= _FAR:
            return []
        return [
            f"the loss jumps from {before[-1]:.4g} to {loss:.4g} at step {step:,}, {far:.0f} times the usual spread of"
            " its steps: wrong samples, or too high a learning rate"
        ]


def _jump(values: Sequence[float]) -> float:
    """How far the last step from value to value is above the others, in robust standard deviations."""
    *steps, last = [after - before for before, after in pairwise(values)]
    middle = median(steps)
    spread = _SIGMA * median(abs(each - middle) for each in steps)
    return (last - middle) / spread if spread > 0 else 0.0
