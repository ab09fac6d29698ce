"""The precision that a run computes in: is what differs there as small as what rounding makes of one process alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.proof.record import LOSS, Record

# of a number, relative to it: half of it at most, but of weights in fp64 a whole one, for half of it rounds to nothing
LAST_BIT = {"fp64": 2.0**-52, "fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
ABOVE = 30  # times the noise floor, of which one draw is known


@dataclass(frozen=True)
class Rounding:
    """How far a strategy is from one process in the configured precision."""

    precision: str
    gap: float  # of losses, relative
    floor: float  # how far one process is from itself, with each weight moved by the last bit

    @property
    def explains(self) -> bool:
        """Is the gap of the kind that rounding makes?"""
        return self.gap <= ABOVE * self.floor

    def __str__(self) -> str:
        return f"{self.precision} gap {self.gap:.1e} (noise floor {self.floor:.1e})"


def losses(record: Record) -> list[float]:
    """The loss of each step."""
    keys = [key for key in record.values if key.phase == LOSS and key.name == "loss"]
    return [float("nan") if table[0, 2] else float(table[0, 0]) for table in map(record.table, keys)]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves, relative to the first."""
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(one, other, strict=True))


def floor(alone: Sequence[float], moved: Sequence[float], precision: str) -> float:
    """The noise floor: how far a curve is from itself with weights moved, and no less than its own last bit."""
    return max(apart(alone, moved), LAST_BIT[precision])
