"""How far a run is, as every checkpoint has it; and whether it ends or goes back after a step that went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from trainer.messages import BadStep
from trainer.records.checkpoint.manifest import CheckpointInfo


@dataclass
class Progress:
    """How far training is: what a resumed run must know beside tensors. The fields are keys of a checkpoint."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch that the next step belongs to
    position: int = 0  # samples of that epoch's order that are done
    samples: int = 0  # samples trained on since the start, over all ranks
    owed: int | None = None  # the epoch of this step, if a request to stop interrupted its evaluation
    stale: int = 0  # evaluations since the best one
    rollbacks: int = 0  # how often it has gone back to a checkpoint
    left_out: int = 0  # samples that were skipped by going back

    def advance(self, batch: int, length: int) -> int | None:
        """Count a step of `batch` samples, of an epoch of `length`; how many epochs are done, if it ends one."""
        self.step += 1
        self.samples += batch
        self.position += batch
        return self.epoch if self.begin_next_epoch(batch, length) else None

    def begin_next_epoch(self, batch: int, length: int) -> bool:
        """Begin the next epoch if this one has no whole batch left. Returns whether it did."""
        if self.position + batch <= length:
            return False
        self.epoch, self.position = self.epoch + 1, 0
        return True

    def after(self, step: int, batch: int, length: int) -> Progress:
        """The progress after this step; each step has `batch` samples."""
        progress = replace(self)
        while progress.step < step:
            progress.advance(batch, length)
        return progress

    def skip_to(self, other: Progress) -> None:
        """After going back to a checkpoint: go on with the samples after those of another progress."""
        self.epoch, self.position = other.epoch, other.position
        self.left_out = other.samples + other.left_out - self.samples
        self.rollbacks = other.rollbacks + 1


MAX_TRIES = 3  # times that a run goes back to the same checkpoint


Find = Callable[[float], CheckpointInfo | None]  # the newest valid checkpoint of a step before this one


class StopOnNonFinite:
    """The run ends."""

    def choose_checkpoint(self, error: BadStep, find_newest: Find) -> CheckpointInfo:
        """Collective if `find_newest` is: the checkpoint to go on from. Raises the error if the run is to end."""
        raise error


class RollBack(StopOnNonFinite):
    """The run goes back to its newest good checkpoint; without a save in between only a few times."""

    def __init__(self) -> None:
        self._step, self._times = -1, 0  # of the last checkpoint that was gone back to; how often

    def choose_checkpoint(self, error: BadStep, find_newest: Find) -> CheckpointInfo:
        """Collective: the newest good checkpoint. Raises the error if there is none, or if it was used too often."""
        # one that was good before still is: bad samples right behind it must not lead further and further back
        checkpoint, then = find_newest(max(error.before, self._step + 1)), ""
        if checkpoint is None:
            known = error.before < inf
            then = f"There is no checkpoint {f'of before step {error.before:,}' if known else 'to go back to yet'}. "
        else:
            self._times = self._times + 1 if checkpoint.step == self._step else 1
            self._step = checkpoint.step
            if self._times > MAX_TRIES:
                then = f"The run has gone back {MAX_TRIES} times to step {checkpoint.step}, and no save has followed. "
        if checkpoint is None or then:
            raise type(error)(error.step, error.what, error.read, then, error.before) from None
        return checkpoint


# by the value of loop.on_nonfinite; with "skip" steps are left out (StepSkipper), and too many of them end the run
NONFINITE_POLICIES = {"stop": StopOnNonFinite, "skip": StopOnNonFinite, "rollback": RollBack}
