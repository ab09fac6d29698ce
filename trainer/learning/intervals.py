"""When things happen: every so many steps, epochs or seconds, whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True)
class Interval:
    """One rhythm; a part that is None never comes."""

    steps: int | None = None  # optimizer steps
    epochs: int | None = None
    seconds: float | None = None  # since it happened last


@dataclass(frozen=True)
class Cadences:
    """How often a run does what beside its steps, as it was asked to: of several rhythms whichever comes first.

    Without a rhythm it is never due. A run also evaluates and saves after its last step, and saves when it is asked to
    stop, and after an evaluation that is the best so far: that may be any step.
    """

    log: tuple[Interval, ...] = ()  # a line of figures: loop.log_every
    evaluate: tuple[Interval, ...] = ()  # loop.eval_every
    save: tuple[Interval, ...] = ()  # loop.save_every
    average: tuple[Interval, ...] = ()  # the moving average follows the weights: ema.every; none without ema.decay


class Trigger:
    """Tells at each step whether any of several rhythms has come round. Steps and epochs need no clock.

    What the clock says differs between ranks: `clock` is put to the vote of all, and the answer given to `now`.
    """

    def __init__(self, rhythms: Sequence[Interval]) -> None:
        self._rhythms = rhythms
        # of several clocks the fastest is always the first to run out
        self._seconds = min((every.seconds for every in rhythms if every.seconds is not None), default=None)
        self.restart()

    def restart(self) -> None:
        """It has just happened: the clock begins anew."""
        self._since = monotonic()

    def clock(self) -> bool:
        """Has this rank's clock run out?"""
        return self._seconds is not None and monotonic() - self._since >= self._seconds

    def now(self, step: int, epochs_done: int | None, clock: bool) -> bool:
        """Is it due after this step? `epochs_done`: how many, if this step ended one, else None."""
        # steps and epochs are the same on every rank; only the clock needed a vote.
        for every in self._rhythms:
            if every.steps is not None and step % every.steps == 0:
                return True
            if every.epochs is not None and epochs_done is not None and epochs_done % every.epochs == 0:
                return True
        return clock
