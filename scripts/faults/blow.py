"""A fault that has struck, and the seconds that it cost, from what the run has left."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.faults.plan import Fault

PHASES = ("detect", "restart", "reload", "redo")


@dataclass(frozen=True)
class Blow:
    """All times in seconds of the clock that the run's own lines and status.json have."""

    fault: Fault
    reached: int  # the last step that had been logged when the struck processes were gone
    struck: float
    gone: float = 0.0  # the struck processes
    resumed: int = 0  # the step that the next attempt went on from
    joined: float = 0.0  # status.json said that the next attempt runs
    first: float = 0.0  # its first line
    caught_up: float = 0.0  # its line of the step that had been reached

    @property
    def spent(self) -> dict[str, float]:
        """Until all had noticed; until they were back; until the first step; until the step that had been reached."""
        times = (self.struck, self.gone, self.joined, self.first, self.caught_up)
        return {name: times[at + 1] - times[at] for at, name in enumerate(PHASES)}

    @property
    def lost(self) -> float:
        """Seconds from the fault to a step that had not been done before."""
        return self.caught_up - self.struck

    @property
    def again(self) -> int:
        """Steps that were done twice."""
        return self.reached - self.resumed


@dataclass(frozen=True)
class Survived:
    """A fault that no process ended of."""

    fault: Fault
