"""How far training is: what every checkpoint keeps of it beside tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer.messages import NotFinite
from trainer.records.checkpoint.manifest import CheckpointInfo


@dataclass
class Progress:
    """How far training is: all that a resumed run must know beside tensors."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch that the next step belongs to
    position: int = 0  # samples of that epoch's order that are done
    samples: int = 0  # samples trained on since the start, over all ranks
    owed: int | None = None  # the epoch of this step, where a request to stop broke its evaluation off
    stale: int = 0  # evaluations since the best one
    rollbacks: int = 0  # how often it has gone back to a checkpoint
    left_out: int = 0  # samples of the order that it has passed over in doing so

    def advance(self, batch: int, length: int) -> int | None:
        """Count a step of `batch` samples, of an epoch of `length`; how many epochs are done, if it ends one."""
        self.step += 1
        self.samples += batch
        self.position += batch
        return self.epoch if self.begin_next_epoch(batch, length) else None

    def begin_next_epoch(self, batch: int, length: int) -> bool:
        """Begin the next epoch where this one has no whole batch left; was it so?"""
        if self.position + batch <= length:
            return False
        self.epoch, self.position = self.epoch + 1, 0
        return True

    def after(self, step: int, batch: int, length: int) -> Progress:
        """How far it will be after this step, of `batch` samples each."""
        then = replace(self)
        while then.step < step:
            then.advance(batch, length)
        return then

    def skip_to(self, other: Progress) -> None:
        """After going back: go on with the samples that come after those of another progress."""
        self.epoch, self.position = other.epoch, other.position
        self.left_out = other.samples + other.left_out - self.samples
        self.rollbacks = other.rollbacks + 1


MAX_TRIES = 3  # times that one checkpoint is gone back to


class StopOnNonFinite:
    """The run ends."""

    def target(self, error: NotFinite, newest: Callable[[], CheckpointInfo | None]) -> CheckpointInfo:
        """Collective if `newest` is: the checkpoint to go on from; the error where there is none, the same on all."""
        raise error


class RollBackOnNonFinite(StopOnNonFinite):
    """It goes back. A save in between was finite; without one the same checkpoint can be gone back to a few times."""

    def __init__(self) -> None:
        self._step, self._times = -1, 0  # of the checkpoint that was gone back to last; how often

    def target(self, error: NotFinite, newest: Callable[[], CheckpointInfo | None]) -> CheckpointInfo:
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
