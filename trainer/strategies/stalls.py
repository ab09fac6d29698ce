"""How long a process has stood still: it was stopped, it was swapped out, or it got no processor."""

from __future__ import annotations

from threading import Thread
from time import monotonic, sleep
from weakref import ref

_PERIOD = 0.025  # seconds from tick to tick
_LATE = 0.05  # a tick that is later than that tells of more than a busy machine


class NoStalls:
    """Nobody looks, for nobody waits for this process."""

    seconds = 0.0


class Stalls(NoStalls):
    """A thread that only sleeps and looks at the clock: what its ticks are late by, the process stood still.

    40 ticks a second cost about 0.1 % of a core. The thread ends with this object.
    """

    def __init__(self) -> None:
        Thread(target=_tick, args=(ref(self),), name="stalls", daemon=True).start()


def _tick(owner: ref[Stalls]) -> None:
    while True:
        before = monotonic()
        sleep(_PERIOD)  # not for an event: time itself is what is measured
        late = monotonic() - before - _PERIOD
        stalls = owner()
        if stalls is None:
            return
        stalls.seconds += late if late > _LATE else 0.0
        del stalls  # or the thread would keep it through the next sleep
