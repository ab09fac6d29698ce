"""Where a run's time goes, step by step; and how long its process stood still."""

from __future__ import annotations

from threading import Thread
from time import monotonic, perf_counter, process_time, sleep
from weakref import ref

STEP = ("data", "forward and backward", "communication", "optimizer", "log")  # of every step, in order of time
PHASES = (*STEP, "evaluation", "save")


class StepTimer:
    """Laps of the host's clock. They cost some microseconds a step and never wait for a device."""

    def __init__(self, stalls: NoStallClock) -> None:
        self.steps, self._stalls = 0, stalls  # steps that have begun
        self.done = 0  # phases, and batches of evaluations: where it stands still nothing goes on
        self._begin()
        self._since, self._stood, self._worked = perf_counter(), 0.0, 0.0

    def _begin(self) -> None:
        # seconds, since the second step began: of the clock, and in which this process stood still
        self.spent, self.stood = (dict.fromkeys(PHASES, 0.0) for _ in range(2))
        self.worked = 0.0  # of the processors, in forward and backward

    @property
    def measured(self) -> int:
        """How many steps it is about: all but the first, which compiles, allocates and opens files."""
        return max(self.steps - 1, 0)

    @property
    def laps(self) -> dict[str, float]:
        """Seconds by phase of the steps that are measured; none before the second of them."""
        return self.spent if self.measured else {}

    def step(self) -> None:
        """A step begins: what passed since the last one ended went into its data."""
        self.lap("data")
        self.steps += 1
        if self.steps == 2:
            self._begin()
        self._worked = process_time()

    def computed(self) -> None:
        """A lap of forward and backward; of these the processors' time is known, too, which costs a microsecond."""
        self.worked += process_time() - self._worked
        self.lap("forward and backward")

    def lap(self, phase: str) -> None:
        """What passed since the last lap went into this phase."""
        now, stood = perf_counter(), self._stalls.seconds
        self.spent[phase] += now - self._since
        self.stood[phase] += stood - self._stood
        self._since, self._stood = now, stood
        self.done += 1


_PERIOD = 0.025  # seconds from tick to tick
_LATE = 0.05  # a tick that is later than that tells of more than a busy machine


class NoStallClock:
    """Nobody looks, for nobody waits for this process."""

    seconds = 0.0


class StallClock(NoStallClock):
    """A thread that only sleeps and looks at the clock: what its ticks are late by, the process stood still.

    40 ticks a second cost about 0.1 % of a core. The thread ends with this object.
    """

    def __init__(self) -> None:
        Thread(target=_tick, args=(ref(self),), name="stalls", daemon=True).start()


def _tick(owner: ref[StallClock]) -> None:
    while True:
        before = monotonic()
        sleep(_PERIOD)  # not for an event: time itself is what is measured
        late = monotonic() - before - _PERIOD
        stalls = owner()
        if stalls is None:
            return
        stalls.seconds += late if late > _LATE else 0.0
        del stalls  # or the thread would keep it through the next sleep
