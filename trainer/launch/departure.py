"""A run that stops on several machines: which of them were asked to, and which have merely lost the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from trainer.launch.launch import Launch

_LATER = 2.0  # seconds in which a request that is meant for all machines reaches the last of them


class Request(Protocol):
    """What a process was asked itself."""

    @property
    def raised(self) -> bool:
        """Was it asked anything?"""

    @property
    def reason(self) -> str:
        """By what; empty while it was not."""


def left_behind(launch: Launch, request: Request, share: Callable[[Any], list[Any]]) -> bool:
    """Collective: has another machine been asked to stop, and this one not? Then the run is to go on without it.

    Each machine has a torchrun of its own. One that ends (a spot machine that is taken back, a killed torchrun) takes
    its processes along; those of the other machines stop with them, since no collective works any more, but are not
    done: only if they say so with their exit code does their torchrun start them again, with the machines that are
    left. Where nobody was asked (`run.stop_after`), nobody is left behind.
    """
    if not launch.restarts or launch.local_world_size == launch.world_size:
        return False
    deadline = time.monotonic() + _LATER
    while not request.raised and time.monotonic() < deadline:
        time.sleep(0.02)
    machine = launch.rank - launch.local_rank  # torchrun counts one machine through before the next
    asked = {other for other, reason in share([machine, request.reason]) if reason}
    return bool(asked) and machine not in asked
