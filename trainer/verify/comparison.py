"""A record against another one: what differs, by how much, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from statistics import median
from typing import NamedTuple

import torch

from trainer.parallel.optimizer_state import EMA_PREFIX, OPTIMIZER_PREFIX
from trainer.verify.tensor_sketch import FIRST, LENGTH, PATTERN, moved
from trainer.verify.training_record import CLIPPED, GRADIENT, LOSS, NORM, Key, Record

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


_OF_ROWS = 1e-3  # of a tensor's largest row: a sample that has less than that of it has fewer digits
_ONLY_ROUNDING = 1e-3  # a gradient of which rounding changes so much, relative to it, is nothing else


class Exactness(NamedTuple):
    """What counts as rounding in a precision, relative to the norms."""

    tolerance: float  # of any difference
    above: float  # times the noise floor, of which one draw is known
    most: float  # that is excused by a floor: a choice that a last bit turns must not hide a mistake
    beside: float  # the same in a network with gradients that are only rounding, whose steps the others take up
    # a gradient that counts as none, beside the usual one of its step, if it is only rounding: of a bias before a
    # BatchNorm, of the keys of an attention. An Adam makes whole steps of it, so its floors are believed as they are
    nothing: float
    share: float  # of the usual norm of a step's phase: what is zero but for rounding has no digits to agree in


EXACTNESS = {
    "fp64": Exactness(1e-9, 10, 1e-6, 1e-3, 1e-9, 1e-6),
    "fp32": Exactness(2e-6, 10, 0.1, 0.1, 1e-5, 1e-3),
    "bf16": Exactness(4e-3, 10, 0.3, 0.3, 1e-2, 1e-2),
    "fp16": Exactness(1e-3, 10, 0.3, 0.3, 1e-2, 1e-2),
}


def exactness(precision: str, tolerance: float) -> Exactness:
    """What counts as rounding there. tolerance: that of fp64."""
    exact = EXACTNESS[precision]
    return exact._replace(tolerance=tolerance) if precision == "fp64" else exact


class Difference(NamedTuple):
    """One thing that is not what it is in the reference."""

    at: int  # where in the reference's order of time
    key: Key
    gap: float  # relative to the norm
    ratio: float  # of the norms
    rows: list[int]  # samples of the global batch that differ; [0] of what is one thing
    floor: float = 0.0  # what rounding alone makes of it


@dataclass(frozen=True, order=True)
class Near:
    """How near something came to its limit."""

    part: float  # of the limit
    gap: float
    floor: float
    step: int
    phase: str
    name: str


# What there is of a reference, with the smallest norm that a difference is taken relative to, and its own.
Scaled = tuple[Key, float, float]


class Compared(NamedTuple):
    """What a rank has found."""

    differences: list[Difference]  # the first of them
    gaps: dict[str, float]  # the largest of each phase
    seen: dict[Key, int]  # what was compared → rows
    held: frozenset[Key]  # what there was, compared or not
    nearest: dict[str, Near]  # to its limit, of each phase


def compared(reference: Record, own: Record, exact: Exactness, most: int = 100) -> Compared:
    """What of an own record is not as in the reference; both may hold what the other does not.

    The reference's floors say how far rounding alone takes each thing; a network may blow it up beyond the tolerance.
    """
    scaled = [*_scaled(reference, exact)]
    bounds = _bounds(reference, exact, scaled)
    found, gaps, seen, close = list[Difference](), dict[str, float](), dict[Key, int](), dict[str, Near]()
    for at, rows, apart, ratios in _apart(reference, own, scaled):
        key, (floor, limit) = scaled[at][0], bounds[scaled[at][0]]
        gap = max(apart, default=0.0)
        gaps[key.phase], seen[key] = max(gap, gaps.get(key.phase, 0.0)), seen.get(key, 0) + len(rows)
        near = Near(gap / limit, gap, floor, key.step, key.phase, key.name)
        close[key.phase] = max(near, close.get(key.phase, near))
        if gap > limit and len(found) < most:
            where = [row for row, one in zip(rows, apart, strict=True) if one > limit]
            found.append(Difference(at, key, gap, ratios[apart.index(gap)], where, floor))
    return Compared(found, gaps, seen, frozenset(own.values), close)


def nearest(found: Sequence[Compared]) -> dict[str, Near]:
    """What came nearest to its limit on all ranks, of each phase."""
    every = [near for each in found for near in each.nearest.values()]
    return {
        phase: max(near for near in every if near.phase == phase) for phase in dict.fromkeys(n.phase for n in every)
    }


def floors(record: Record, shaken: Record, exact: Exactness) -> dict[Key, float]:
    """How far each thing is from itself where all weights have been moved by a last bit: so far rounding takes it."""
    scaled = [*_scaled(record, exact)]
    found = {key: 0.0 for key, _, _ in scaled}
    for at, _, apart, _ in _apart(record, shaken, scaled):
        found[scaled[at][0]] = max(apart, default=found[scaled[at][0]])
    return found


def _apart(
    reference: Record, own: Record, scaled: Sequence[Scaled]
) -> Iterator[tuple[int, Sequence[int], list[float], list[float]]]:
    """The rows of each key, with how far each is apart, relative to its norm or the scale; and the ratios of the norms.

    All are compared at once: one by one, thousands of small tensors take half a second.
    """
    parts = [
        (at, rows, signatures, reference.rows(key, rows), scale)
        for at, (key, scale, _) in enumerate(scaled)
        for rows, signatures in own.values.get(key, ())
    ]
    if not parts:
        return
    sizes = [len(rows) for _, rows, _, _, _ in parts]
    signatures, wanted = torch.cat([part[2] for part in parts]), torch.cat([part[3] for part in parts])
    scales = torch.tensor([part[4] for part in parts], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    apart = moved(signatures, wanted) / wanted[:, LENGTH].maximum(scales)
    # are the same numbers infinite, and the same NaN?
    agreed = (signatures[:, PATTERN] == wanted[:, PATTERN]) & ~apart.isnan()
    apart = torch.where(agreed, apart, torch.inf)
    ratios = signatures[:, LENGTH] / wanted[:, LENGTH].clamp(min=1e-300)
    for (at, rows, *_), own_apart, own_ratios in zip(parts, apart.split(sizes), ratios.split(sizes), strict=True):
        yield at, rows, own_apart.tolist(), own_ratios.tolist()


def _bounds(reference: Record, exact: Exactness, scaled: Sequence[Scaled]) -> dict[Key, tuple[float, float]]:
    """What rounding alone makes of each thing, and how far it may be apart."""
    bounds = dict[Key, tuple[float, float]]()
    # a NaN excuses nothing
    floors = {key: floor if floor < torch.inf else 0.0 for key, floor in reference.floors.items()}
    # a single number may be the same by chance: what it is in another step says more
    numbers = dict[tuple[str, str], float]()
    for key, floor in floors.items():
        if key.phase in (LOSS, NORM):
            numbers[key.phase, key.name] = max(floor, numbers.get((key.phase, key.name), 0.0))
    rounding = _only_rounding(reference, exact, scaled)
    most = exact.beside if rounding else exact.most
    for _, group in groupby(reference.values, key=lambda key: (key.step, key.phase)):
        keys = [*group]
        # the draw of one tensor may be small by chance
        usual = median(floors.get(key, 0.0) for key in keys)
        for key in keys:
            floor = max(floors.get(key, 0.0), usual, numbers.get((key.phase, key.name), 0.0))
            excused = exact.above * floor if _parameter(key.name) in rounding else min(exact.above * floor, most)
            bounds[key] = floor, max(exact.tolerance, excused)
    return bounds


def _only_rounding(reference: Record, exact: Exactness, scaled: Sequence[Scaled]) -> set[str]:
    """The parameters whose gradient is zero but for rounding, in some step."""
    found = set[str]()
    gradients = [each for each in scaled if each[0].phase == GRADIENT]
    for _, group in groupby(gradients, key=lambda each: each[0].step):
        of_step = [*group]
        small = exact.nothing * _usual([norm for _, _, norm in of_step])
        for key, scale, norm in of_step:
            # none at all makes no steps: of LoRA's A, or after a ReZero, the first gradient is exactly 0
            if 0 < norm < small and reference.floors.get(key, 0.0) * scale > _ONLY_ROUNDING * norm:
                found.add(key.name)
    return found


def _scaled(reference: Record, exact: Exactness) -> Iterator[Scaled]:
    """All of a reference, in order."""
    for _, group in groupby(reference.values, key=lambda key: (key.step, key.phase)):
        keys = [*group]
        norms = dict(zip(keys, reference.norms(keys), strict=True))
        kinds: dict[str, list[float]] = {}
        for key, norm in norms.items():
            kinds.setdefault(_kind(key.name), []).append(norm)
        usual = {kind: exact.share * _usual(own) for kind, own in kinds.items()}
        for key, norm in norms.items():
            yield key, max(_OF_ROWS * norm, usual[_kind(key.name)], 1e-300), norm


def _usual(norms: Sequence[float]) -> float:
    """The median of what is not zero: one tensor of large numbers says nothing of the others."""
    return median([norm for norm in norms if norm] or [0.0])


def _kind(name: str) -> str:
    """What is of one size with it: squares that an optimizer keeps are no weights."""
    return name.rpartition("/")[2] if name.startswith(OPTIMIZER_PREFIX) else ""


def _parameter(name: str) -> str:
    """The parameter that a value belongs to: itself, or what an optimizer or an average keeps of it."""
    if name.startswith(OPTIMIZER_PREFIX):
        return name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0]
    return name.removeprefix(EMA_PREFIX)
