"""How often a run logs, evaluates and saves: every so many steps, epochs or seconds, whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True)
class Interval:
    """One interval: after so many steps, epochs or seconds. A field that is None does not count."""

    steps: int | None = None  # optimizer steps
    epochs: int | None = None
    seconds: float | None = None  # since it happened last


@dataclass(frozen=True)
class Cadences:
    """The intervals of a run, as its configuration has them. Of several the first that has passed counts.

    Without an interval it never happens. A run also evaluates and saves after its last step, and saves when it is asked
    to stop and after the best evaluation so far: that may be any step.
    """

    log: tuple[Interval, ...] = ()  # a line of training metrics: loop.log_every
    evaluate: tuple[Interval, ...] = ()  # loop.eval_every
    save: tuple[Interval, ...] = ()  # loop.save_every
    average: tuple[Interval, ...] = ()  # the moving average follows the weights: ema.every; none without ema.decay


class Trigger:
    """Says after each step whether one of several intervals has passed.

    Steps and epochs are the same on every rank, but clocks differ. So a rank asks `clock_expired`, all ranks vote, and
    `is_due` gets the result.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        # of several clocks the fastest always runs out first
        self._seconds = min((each.seconds for each in intervals if each.seconds is not None), default=None)
        self.restart()

    def restart(self) -> None:
        """It has just happened: the clock begins anew."""
        self._since = monotonic()

    def clock_expired(self) -> bool:
        """Has this rank's clock run out?"""
        return self._seconds is not None and monotonic() - self._since >= self._seconds

    def is_due(self, step: int, epochs_done: int | None, clock_expired: bool) -> bool:
        """Is it due after this step? `epochs_done`: how many, if this step ended an epoch, else None."""
        for interval in self._intervals:
            if interval.steps is not None and step % interval.steps == 0:
                return True
            if interval.epochs is not None and epochs_done is not None and epochs_done % interval.epochs == 0:
                return True
        return clock_expired
