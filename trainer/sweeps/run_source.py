"""Where the next run of a sweep comes from: a list, or somebody who chooses by how the ones before ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.configuration.multirun import Trial
from trainer.sweeps.results import Outcome, SweepResults


class RunSource(Protocol):
    """Gives one run after the other, and is told how each ended."""

    def next(self) -> Trial | None:
        """The next run; None: there are no more."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """A run has ended."""

    def left(self) -> int:
        """How many are still to come."""

    def outcomes(self) -> list[Outcome | None]:
        """How all of them ended, earlier commands' included; None for those that have not."""


class RunList:
    """A list of runs; those that an earlier command completed are not run again."""

    def __init__(self, trials: Sequence[Trial], tried: SweepResults) -> None:
        self._all, self._tried = trials, tried
        self._left = tried.left(trials)  # one that failed is tried again: its cause may be gone, a full disk perhaps

    def next(self) -> Trial | None:
        """The next that is not completed."""
        return self._left.pop(0) if self._left else None

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """A list does not change by it."""

    def left(self) -> int:
        """How many are still to come."""
        return len(self._left)

    def outcomes(self) -> list[Outcome | None]:
        """One for each."""
        return [self._tried.of(trial) for trial in self._all]
