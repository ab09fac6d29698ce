"""The precision that a run computes in: is what differs there as small as what rounding makes of one process alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from trainer.proof.comparison import EXACTNESS, Compared, Near, compared, nearest
from trainer.proof.record import CLIPPED, GRADIENT, LOSS, NORM, Record
from trainer.proof.signature import FIRST, PATTERN

# of a number, relative to it: half of it at most, but of weights in fp64 a whole one, for half of it rounds to nothing
LAST_BIT = {"fp64": 2.0**-52, "fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
# so many last bits each weight is moved by to find the floors: a ReLU whose input is that near to zero may be on either
# side of it, which one last bit would seldom show; in narrow precisions more would be no small change
BITS = {"fp64": 30, "fp32": 30, "bf16": 3, "fp16": 3}
# Where a ReLU falls on its other side, it changes the gradients of the layers before it, some of them or most. What
# reduces gradients, or scales losses, changes all of them: this part of a step's at least, and some of its first ones
_MANY, _FIRST = 0.25, 3
COMPARED = (LOSS, GRADIENT, NORM, CLIPPED)  # there


@dataclass(frozen=True)
class Rounding:
    """How far a strategy is from one process in the configured precision."""

    precision: str
    gap: float  # of losses, relative
    floor: float  # how far one process is from itself, with each weight moved by the last bit
    first: Near | None  # what rounding does not explain
    nearest: dict[str, Near]  # to its limit, of each phase

    @property
    def explains(self) -> bool:
        """Is all that differs of the kind that rounding makes?"""
        return self.first is None

    def __str__(self) -> str:
        return f"{self.precision} gap {self.gap:.1e} (noise floor {self.floor:.1e})"


def rounded(precision: str, plain: Record, found: Sequence[Compared], curves: Sequence[Sequence[float]]) -> Rounding:
    """What the findings of all ranks in a precision mean. curves: the losses of one process, and of the strategy."""
    differences = {one.key: one for each in found for one in each.differences}
    seen = {key for each in found for key in each.seen}
    told = []
    for _, group in groupby(plain.values, key=lambda key: (key.step, key.phase)):
        keys = [key for key in group if key in seen]
        other = [key for key in keys if key in differences]
        if len(other) >= _MANY * len(keys) and any(key in differences for key in keys[:_FIRST]):
            told += [differences[key] for key in other]
    least = min(told, key=lambda one: one.at, default=None)
    first = Near(0.0, least.gap, least.floor, least.key.step, least.key.phase, least.key.name) if least else None
    return Rounding(precision, apart(*curves), plain.facts["floor"], first, nearest(found))


def compared_there(plain: Record, own: Record, precision: str) -> Compared:
    """What of an own record is further from the reference's than rounding takes it, however far that is."""
    exact = EXACTNESS[precision]._replace(most=inf, beside=inf)
    return compared(plain, own, exact, most=len(plain.values))


def shake(precision: str) -> float:
    """How far weights are moved to find the floors, relative to themselves."""
    return BITS[precision] * LAST_BIT[precision]


def losses(record: Record) -> list[float]:
    """The loss of each step."""
    keys = [key for key in record.values if key.phase == LOSS and key.name == "loss"]
    tables = map(record.table, keys)
    return [float("nan") if table[0, PATTERN] else float(table[0, FIRST]) for table in tables]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves, relative to the first."""
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(one, other, strict=True))


def floor(alone: Sequence[float], moved: Sequence[float], precision: str) -> float:
    """The noise floor: how far a curve is from itself with weights moved by a last bit, and no less than its own."""
    return max(apart(alone, moved) / BITS[precision], LAST_BIT[precision])
