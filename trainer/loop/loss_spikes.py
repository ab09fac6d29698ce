"""A loss that jumps from log line to log line: it is told, or the run goes back to a checkpoint from before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from trainer.messages import LossJump

_WINDOW = 50  # lines that a jump is compared with
_FAR = 8.0  # robust standard deviations
_SIGMA = 1.4826  # of a normal distribution, per median absolute deviation


class SpikeWatch:
    """Finds a jump of the loss, once: above all of the last 50 lines, by a step far larger than theirs.

    Steps from line to line are compared, and not losses: those fall, and lie wide apart while a run learns fast. This
    class: a jump is told, and the run goes on.
    """

    goes_back: ClassVar[bool] = False

    def __init__(self) -> None:
        self._since = 0  # the step of the last line
        self.load({})

    def look(self, step: int, loss: float) -> LossJump | None:
        """The loss of the next line: has it jumped?"""
        before, since = [*self._losses], self._since
        if not math.isfinite(loss):  # which other checks find
            return None
        self._losses.append(loss)
        self._since = step
        # what stays up is told once: it is no new height then
        if len(before) < _WINDOW or loss <= max(before):
            return None
        # small losses differ by factors, so their logarithms must have jumped as well: one hard sample is no spike
        losses = [*before, loss]
        far = (
            _jump_size(losses)
            if min(losses) <= 0
            else min(_jump_size(losses), _jump_size([math.log(each) for each in losses]))
        )
        if far <= _FAR:
            return None
        what = (
            f"the loss jumps from {before[-1]:.4g} to {loss:.4g} at step {step:,}, {far:.0f} times the usual spread of"
            f" its steps (median of the {len(before)} lines before: {median(before):.4g})"
        )
        return LossJump(step, since, what)

    def state(self, carry: Callable[[], tuple[float, int]]) -> dict[str, Any]:
        """Collective if `carry` is called: what a resumed run must know, as JSON. Here nothing: it looks anew."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state; empty: no line has been seen."""
        self._losses: deque[float] = deque(state.get("losses", ()), maxlen=_WINDOW + 1)  # of the lines before
        self._since = int(state.get("since", 0))
        # what was added up since that line, over all ranks: a sum of losses, and of how many steps
        self.carried: tuple[float, int] = (state.get("sum", 0.0), int(state.get("steps", 0)))


class RollBackOnSpike(SpikeWatch):
    """The run goes back to a checkpoint from before the jump. So a resumed run must find the same jumps."""

    goes_back: ClassVar[bool] = True

    def state(self, carry: Callable[[], tuple[float, int]]) -> dict[str, Any]:
        """Collective: the lines so far, and what was added up for the next one."""
        total, steps = carry()
        return {"losses": [*self._losses], "since": self._since, "sum": total, "steps": steps}


SPIKE_POLICIES = {"warn": SpikeWatch, "rollback": RollBackOnSpike}  # by the value of loop.on_spike


def _jump_size(values: Sequence[float]) -> float:
    """How far the last step from value to value is above the others, in robust standard deviations."""
    *steps, last = [after - before for before, after in pairwise(values)]
    middle = median(steps)
    # robust: a few jumps among the last lines do not widen it
    spread = _SIGMA * median(abs(each - middle) for each in steps)
    return (last - middle) / spread if spread > 0 else 0.0
