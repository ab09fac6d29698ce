"""How often the ranks of a loop ask each other whether to stop, and whose clock ran out."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter

from trainer.parallel.ranks import Vote
from trainer.strategies.process_topology import WATCHDOG_MARGIN, RankContext

SECONDS = 0.05  # between two votes, where steps are shorter: a request to stop is heard as soon as that
MOST = 32  # steps between two votes, should they become slow all at once


class StopVotes:
    """The votes of one loop's ranks: at each step, or at every so many of them where a vote would take as long as one.

    Flags stay raised until they are heard. When the next vote comes follows from the last one, so that all ranks agree.
    """

    def __init__(self, place: RankContext) -> None:
        self._place = place
        # Beside a GPU a vote costs no time: there each step's vote is what hears of a rank that hangs before the host
        # waits for the GPU, where nothing but NCCL's watchdog would end it.
        # A process alone need ask nobody: what is raised is the answer, at each step.
        self._most = MOST if place.device.type == "cpu" and place.world.size > 1 else 1
        self._apart = self._left = 1  # steps from the last vote to the next; how many of them are still to come
        self._since = -inf  # nothing is known about steps until the second vote

    def ask(self, *flags: bool) -> None:
        """Collective where a vote is due, one for each step: start asking which flags any rank has raised."""
        self._flags = (False,) * len(flags)
        self._left -= 1
        if not self._left:
            now = perf_counter()
            self._vote = self._begin((now - self._since) / self._apart, *flags)  # how long a step took, and the flags
            self._since = now

    def read(self) -> Sequence[bool]:
        """The flags that some rank had raised, the same on every rank; none of them where there was no vote."""
        if self._left:
            return self._flags
        slowest, *flags = self._vote.read()
        self._apart = self._left = max(1, min(self._most, int(SECONDS / slowest)))
        return [bool(flag) for flag in flags]

    def now(self, *flags: bool) -> Sequence[bool]:
        """Collective: the flags that some rank has raised, beside those of the steps; waits for the answer."""
        return [bool(flag) for flag in self._begin(*flags).read()]

    def _begin(self, *numbers: float) -> Vote:
        # all ranks; 8 bytes a number, as a CPU tensor while the step computes: no GPU waits
        return self._place.world.vote(numbers, self._place.patience + WATCHDOG_MARGIN)
