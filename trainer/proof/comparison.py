"""A record against another one: what differs, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch

from trainer.parallel.state import AVERAGE, PREFIX
from trainer.proof.record import GRADIENT, INITIAL, RESUME, UPDATE, Key, Record
from trainer.proof.rounding import ABOVE

_OF_VALUES = 1e-3  # as Exactness.of_phase, of weights and buffers: running means take up what Adam has made of a bias


class Exactness(NamedTuple):
    """What counts as rounding in a precision, relative to the norms."""

    tolerance: float  # of any difference
    most: float  # that a noise floor is believed: a choice that a last bit turns, or a NaN, must not excuse a mistake
    nothing: float  # a gradient that counts as none: an Adam makes whole steps of rounding
    # Of the largest norm of a step's phase. The gradient of a bias before a BatchNorm is but rounding, which is small
    # beside other gradients only. What is really that small is compared all the same, in fewer digits.
    of_phase: float


EXACTNESS = {"fp64": Exactness(1e-9, 1e-6, 1e-9, 1e-6), "fp32": Exactness(2e-6, 1e-3, 1e-5, 1e-3)}


class Difference(NamedTuple):
    """One thing that is not what it is in the reference."""

    at: int  # where in the reference's order of time
    key: Key
    gap: float  # relative to the norm
    ratio: float  # of the norms
    rows: list[int]  # samples of the global batch that differ; [0] of what is one thing


class Compared(NamedTuple):
    """What a rank has found."""

    differences: list[Difference]  # the first of them
    gaps: dict[str, float]  # the largest of each phase
    seen: dict[Key, int]  # what was compared → rows
    held: frozenset[Key]  # what there was, compared or not


def compared(
    reference: Record, own: Record, exact: Exactness, floors: Mapping[str, float] | None = None, most: int = 100
) -> Compared:
    """What of an own record is not as in the reference; both may hold what the other does not.

    floors: how far rounding alone takes a phase; a network may blow it up beyond the tolerance.
    """
    limits = {phase: max(exact.tolerance, min(ABOVE * floor, exact.most)) for phase, floor in (floors or {}).items()}
    found, gaps, seen = list[Difference](), dict[str, float](), dict[Key, int]()
    for at, key, floor in _scaled(reference, exact):
        if key not in own.values:
            continue
        table = reference.table(key, 1 + max((row for rows, _ in own.values[key] for row in rows), default=0))
        for rows, signatures in own.values[key]:
            wanted = table[list(rows)]
            apart = (signatures - wanted)[:, :2].abs().amax(1) / wanted[:, 1].clamp(min=floor)
            # are the same numbers infinite, and the same NaN?
            agreed = (signatures[:, 2] == wanted[:, 2]) & ~apart.isnan()
            apart = torch.where(agreed, apart, torch.inf)
            gap = float(apart.max()) if len(rows) else 0.0
            gaps[key.phase], seen[key] = max(gap, gaps.get(key.phase, 0.0)), seen.get(key, 0) + len(rows)
            limit = limits.get(key.phase, exact.tolerance)
            if gap > limit and len(found) < most:
                worst = int(apart.argmax())
                ratio = float(signatures[worst, 1] / wanted[worst, 1].clamp(min=1e-300))
                where = [row for row, one in zip(rows, apart.tolist(), strict=True) if one > limit]
                found.append(Difference(at, key, gap, ratio, where))
    return Compared(found, gaps, seen, frozenset(own.values))


def _scaled(reference: Record, exact: Exactness) -> Iterator[tuple[int, Key, float]]:
    """The keys of a reference, in order, each with the smallest norm that a difference is taken relative to.

    What would be zero without rounding has no digits to agree in.
    """
    at, nothing = 0, set[str]()
    for _, group in groupby(reference.values, key=lambda key: (key.step, key.phase)):
        largest = {key: float(reference.table(key)[:, 1].max()) for key in group}
        # a buffer that nothing changes, as large as it may be, says nothing of how far weights are rounded
        moving = [own for key, own in largest.items() if not _still(reference, key)]
        most = max(moving or largest.values())
        for key, own in largest.items():
            # none at all makes no steps: of LoRA's A, or after a ReZero, the first gradient is exactly 0
            if key.phase == GRADIENT and 0 < own < exact.nothing * most:
                nothing.add(key.name)
            values = key.phase in (UPDATE, RESUME)
            if not values or _parameter(key.name) not in nothing:
                yield at, key, max((_OF_VALUES if values else exact.of_phase) * most, 1e-300)
            at += 1


def _still(reference: Record, key: Key) -> bool:
    """Is it as it was before training?"""
    first = Key(0, INITIAL, key.name)
    return (
        key.phase in (UPDATE, RESUME)
        and first in reference.values
        and reference.table(first).equal(reference.table(key))
    )


def _parameter(name: str) -> str:
    """The parameter that a value belongs to: itself, or what an optimizer or an average keeps of it."""
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX).rpartition("/")[0]
    return name.removeprefix(AVERAGE)
