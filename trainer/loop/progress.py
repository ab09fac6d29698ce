"""How far a run is, as every checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How far training is: what a resumed run must know beside tensors. The fields are keys of a checkpoint."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch that the next step belongs to
    position: int = 0  # samples of that epoch's order that are done
    samples: int = 0  # samples trained on since the start, over all ranks
    owed: int | None = None  # the epoch of this step, if a request to stop interrupted its evaluation
    stale: int = 0  # evaluations since the best one
    left_out: int = 0  # samples that were passed over without a step

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
