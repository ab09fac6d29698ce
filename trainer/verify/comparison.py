"""The comparison of two training records: what differs, by how much, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple

import torch

from trainer.parallel.optimizer_state import EMA_PREFIX, OPTIMIZER_PREFIX
from trainer.verify.training_record import LENGTH, PATTERN, Key, Phase, TrainingRecord, sketch_distance

# of a number, relative to it: half of it at most, but of weights in fp64 a whole one, for half of it rounds to nothing
LAST_BIT = {"fp64": 2.0**-52, "fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
# so many last bits each weight is moved by to find the floors: a ReLU whose input is that near to zero may be on either
# side of it, which one last bit would seldom show; in narrow precisions more would be no small change
PERTURBED_BITS = {"fp64": 30, "fp32": 30, "bf16": 3, "fp16": 3}
# what no rank may have and one process not: an optimizer decays what has a gradient, also one of zeros
NEVER_EXTRA = (Phase.GRADIENT, Phase.STEP)
_OF_ROWS = 1e-3  # of a tensor's largest row: a sample that has less than that of it has fewer digits
_ONLY_ROUNDING = 1e-3  # a gradient of which rounding changes so much, relative to it, is nothing else


class Tolerances(NamedTuple):
    """What counts as rounding in a precision, relative to the norms."""

    tolerance: float  # of any difference
    floor_factor: float  # times the noise floor, of which a single sample is known
    excused: float  # most that a floor excuses: a choice that a last bit turns must not hide a mistake
    excused_beside: float  # the same if some gradients are only rounding: the steps of the others take it up
    # a gradient that counts as none, beside the usual one of its step, if it is only rounding: of a bias before a
    # BatchNorm, of the keys of an attention. An Adam makes whole steps of it, so its floors are believed as they are
    nothing: float
    share: float  # of the usual norm of a step's phase: what is zero but for rounding has no digits to agree in


TOLERANCES = {
    "fp64": Tolerances(1e-9, 10, 1e-6, 1e-3, 1e-9, 1e-6),
    "fp32": Tolerances(2e-6, 10, 0.1, 0.1, 1e-5, 1e-3),
    "bf16": Tolerances(4e-3, 10, 0.3, 0.3, 1e-2, 1e-2),
    "fp16": Tolerances(1e-3, 10, 0.3, 0.3, 1e-2, 1e-2),
}


def tolerances_in(precision: str, tolerance: float) -> Tolerances:
    """What counts as rounding in this precision. tolerance: that of fp64, as the user has set it."""
    tolerances = TOLERANCES[precision]
    return tolerances._replace(tolerance=tolerance) if precision == "fp64" else tolerances


# --- what is found. The names of the fields are those in verify.json ---


class Difference(NamedTuple):
    """One thing that is not what it is in the reference."""

    at: int  # where in the reference's order of time
    key: Key
    gap: float  # relative to the norm
    ratio: float  # of the norms
    rows: list[int]  # samples of the global batch that differ; [0] of what is one thing
    floor: float = 0.0  # what rounding alone makes of it


@dataclass(frozen=True, order=True)
class Margin:
    """How near something came to its limit."""

    part: float  # of the limit
    gap: float
    floor: float
    step: int
    phase: str
    name: str


class Comparison(NamedTuple):
    """What one rank has found."""

    differences: list[Difference]  # the first of them
    gaps: dict[str, float]  # the largest of each phase
    seen: dict[Key, int]  # what was compared → rows
    held: frozenset[Key]  # what there was, compared or not
    nearest: dict[str, Margin]  # to its limit, of each phase
    wider: tuple[str, ...] = ()  # modules whose output has wider numbers than the reference's


class _Scaled(NamedTuple):
    """Something in a reference, and what a difference of it is taken relative to."""

    key: Key
    scale: float  # the smallest norm of a row that counts
    norm: float  # its own


def compare(
    reference: TrainingRecord, record: TrainingRecord, tolerances: Tolerances, max_differences: int = 100
) -> Comparison:
    """What in a record is not as in the reference; both may hold what the other does not.

    The reference's floors say how far rounding alone takes each thing; a network may blow it up beyond the tolerance.
    """
    scaled = [*_with_scales(reference, tolerances)]
    limits = _limits(reference, tolerances, scaled)
    differences, gaps, seen, nearest = list[Difference](), dict[str, float](), dict[Key, int](), dict[str, Margin]()
    for at, rows, distances, ratios in _row_distances(reference, record, scaled):
        key = scaled[at].key
        floor, limit = limits[key]
        gap = max(distances, default=0.0)
        gaps[key.phase], seen[key] = max(gap, gaps.get(key.phase, 0.0)), seen.get(key, 0) + len(rows)
        margin = Margin(gap / limit, gap, floor, key.step, key.phase, key.name)
        nearest[key.phase] = max(margin, nearest.get(key.phase, margin))
        if gap > limit and len(differences) < max_differences:
            wrong_rows = [row for row, distance in zip(rows, distances, strict=True) if distance > limit]
            differences.append(Difference(at, key, gap, ratios[distances.index(gap)], wrong_rows, floor))
    # what only this rank has comes with the last thing of its step and phase
    last = {item.key[:2]: at for at, item in enumerate(scaled)}
    for key in record.values:
        if key.phase in NEVER_EXTRA and key[:2] in last and key not in reference.values:
            differences.append(Difference(last[key[:2]], key, 1.0, 0.0, [0]))
    return Comparison(differences, gaps, seen, frozenset(record.values), nearest)


def nearest_to_limits(comparisons: Sequence[Comparison]) -> dict[str, Margin]:
    """What came nearest to its limit on all ranks, of each phase."""
    nearest: dict[str, Margin] = {}
    for comparison in comparisons:
        for phase, margin in comparison.nearest.items():
            nearest[phase] = max(margin, nearest.get(phase, margin))
    return nearest


def noise_floors(record: TrainingRecord, perturbed: TrainingRecord, tolerances: Tolerances) -> dict[Key, float]:
    """How far each thing is from itself where all weights have been moved by a last bit: so far rounding takes it."""
    scaled = [*_with_scales(record, tolerances)]
    floors = {item.key: 0.0 for item in scaled}
    for at, _, distances, _ in _row_distances(record, perturbed, scaled):
        key = scaled[at].key
        floors[key] = max(distances, default=floors[key])
    return floors


def _row_distances(
    reference: TrainingRecord, record: TrainingRecord, scaled: Sequence[_Scaled]
) -> Iterator[tuple[int, Sequence[int], list[float], list[float]]]:
    """The rows of each key, with how far each is apart, relative to its norm or the scale; and the ratios of the norms.

    All are compared at once: one by one, thousands of small tensors take half a second.
    """
    parts = [
        (at, rows, sketches, reference.rows(item.key, rows), item.scale)
        for at, item in enumerate(scaled)
        for rows, sketches in record.values.get(item.key, ())
    ]
    if not parts:
        return
    sizes = [len(rows) for _, rows, _, _, _ in parts]
    # (rows of all parts, 10)
    sketches, expected = torch.cat([part[2] for part in parts]), torch.cat([part[3] for part in parts])
    scales = torch.tensor([part[4] for part in parts], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    distances = sketch_distance(sketches, expected) / expected[:, LENGTH].maximum(scales)
    # are the same numbers infinite, and the same NaN?
    same_pattern = (sketches[:, PATTERN] == expected[:, PATTERN]) & ~distances.isnan()
    distances = torch.where(same_pattern, distances, torch.inf)
    ratios = sketches[:, LENGTH] / expected[:, LENGTH].clamp(min=1e-300)
    by_part = zip(parts, distances.split(sizes), ratios.split(sizes), strict=True)
    for (at, rows, *_), part_distances, part_ratios in by_part:
        yield at, rows, part_distances.tolist(), part_ratios.tolist()


def _limits(
    reference: TrainingRecord, tolerances: Tolerances, scaled: Sequence[_Scaled]
) -> dict[Key, tuple[float, float]]:
    """What rounding alone makes of each thing, and how far it may be apart."""
    limits = dict[Key, tuple[float, float]]()
    # a NaN excuses nothing
    floors = {key: floor if floor < torch.inf else 0.0 for key, floor in reference.floors.items()}
    # a single number may be the same by chance: what it is in another step says more
    single_numbers = dict[tuple[str, str], float]()
    for key, floor in floors.items():
        if key.phase in (Phase.LOSS, Phase.NORM):
            single_numbers[key.phase, key.name] = max(floor, single_numbers.get((key.phase, key.name), 0.0))
    only_rounding = _rounding_parameters(reference, tolerances, scaled)
    most = tolerances.excused_beside if only_rounding else tolerances.excused
    for _, group in groupby(reference.values, key=lambda key: (key.step, key.phase)):
        keys = [*group]
        # the floor of one tensor may be small by chance
        typical = median(floors.get(key, 0.0) for key in keys)
        for key in keys:
            floor = max(floors.get(key, 0.0), typical, single_numbers.get((key.phase, key.name), 0.0))
            excused = tolerances.floor_factor * floor
            if _parameter_of(key.name) not in only_rounding:
                excused = min(excused, most)
            limits[key] = floor, max(tolerances.tolerance, excused)
    return limits


def _rounding_parameters(reference: TrainingRecord, tolerances: Tolerances, scaled: Sequence[_Scaled]) -> set[str]:
    """The parameters whose gradient is zero but for rounding, in some step."""
    parameters = set[str]()
    gradients = [item for item in scaled if item.key.phase == Phase.GRADIENT]
    for _, group in groupby(gradients, key=lambda item: item.key.step):
        of_step = [*group]
        small = tolerances.nothing * _typical_norm([item.norm for item in of_step])
        for key, scale, norm in of_step:
            # none at all makes no steps: of LoRA's A, or after a ReZero, the first gradient is exactly 0
            if 0 < norm < small and reference.floors.get(key, 0.0) * scale > _ONLY_ROUNDING * norm:
                parameters.add(key.name)
    return parameters


def _with_scales(reference: TrainingRecord, tolerances: Tolerances) -> Iterator[_Scaled]:
    """All of a reference, in order."""
    for _, group in groupby(reference.values, key=lambda key: (key.step, key.phase)):
        keys = [*group]
        norms = dict(zip(keys, reference.norms(keys), strict=True))
        groups: dict[str, list[float]] = {}  # norms of one size
        for key, norm in norms.items():
            groups.setdefault(_size_group(key.name), []).append(norm)
        least = {kind: tolerances.share * _typical_norm(group_norms) for kind, group_norms in groups.items()}
        for key, norm in norms.items():
            yield _Scaled(key, max(_OF_ROWS * norm, least[_size_group(key.name)], 1e-300), norm)


def _typical_norm(norms: Sequence[float]) -> float:
    """The median of what is not zero: one tensor of large numbers says nothing of the others."""
    return median([norm for norm in norms if norm] or [0.0])


def _size_group(name: str) -> str:
    """A word for all that is of one size: squares that an optimizer keeps are smaller than weights."""
    return name.rpartition("/")[2] if name.startswith(OPTIMIZER_PREFIX) else ""


def _parameter_of(name: str) -> str:
    """The parameter that a value belongs to: itself, or what an optimizer or an average keeps of it."""
    if name.startswith(OPTIMIZER_PREFIX):
        return name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0]
    return name.removeprefix(EMA_PREFIX)


def perturbation_size(precision: str) -> float:
    """How far weights are moved to find the floors, relative to themselves."""
    return PERTURBED_BITS[precision] * LAST_BIT[precision]
