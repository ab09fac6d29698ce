"""How far training is: what every checkpoint keeps of it beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
        return self.epoch if self.turn(batch, length) else None

    def turn(self, batch: int, length: int) -> bool:
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

    def pass_over(self, other: Progress) -> None:
        """After going back: go on with the samples that come after those of another progress."""
        self.epoch, self.position = other.epoch, other.position
        self.left_out = other.samples + other.left_out - self.samples
        self.rollbacks = other.rollbacks + 1
