"""What follows when a loss or a weight is not finite: the run ends, or goes back to its last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from trainer.messages import NotFinite
from trainer.records.checkpoint.manifest import Found

MAX_TRIES = 3  # times that one checkpoint is gone back to


class StopOnNonFinite:
    """The run ends."""

    def target(self, error: NotFinite, newest: Callable[[], Found | None]) -> Found:
        """Collective if `newest` is: the checkpoint to go on from; the error where there is none, the same on all."""
        raise error


class RollBackOnNonFinite(StopOnNonFinite):
    """It goes back. A save in between was finite; without one the same checkpoint can be gone back to a few times."""

    def __init__(self) -> None:
        self._step, self._times = -1, 0  # of the checkpoint that was gone back to last; how often

    def target(self, error: NotFinite, newest: Callable[[], Found | None]) -> Found:
        """Collective: the newest checkpoint of the run; the error where it has none, or was gone back to too often."""
        found = newest()
        if found is None:
            then = "There is no checkpoint to go back to yet. "
            raise NotFinite(error.step, error.what, error.read, then) from None
        self._times = self._times + 1 if found.step == self._step else 1
        self._step = found.step
        if self._times > MAX_TRIES:
            then = f"The run has gone back {MAX_TRIES} times to step {found.step}, and no save has followed. "
            raise NotFinite(error.step, error.what, error.read, then) from None
        return found


NONFINITE_POLICIES = {
    "stop": StopOnNonFinite,
    "skip": StopOnNonFinite,
    "rollback": RollBackOnNonFinite,
}  # by the word: loop.on_nonfinite
