"""The comparison in the precision of the run, where rounding is as large as a mistake is in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from trainer.jobs.run_parts import PreparedRun
from trainer.verify.comparison import (
    LAST_BIT,
    PERTURBED_BITS,
    TOLERANCES,
    Comparison,
    Margin,
    compare,
    nearest_to_limits,
)
from trainer.verify.training_record import FIRST, PATTERN, Phase, TrainingRecord

# Where a ReLU falls on its other side, it changes the gradients of the layers before it, some of them or most. What
# reduces gradients, or scales losses, changes all of them: this part of a step's at least, and some of its first ones
_MANY, _FIRST = 0.25, 3
# what is compared in it
PHASES_IN_PRECISION = (Phase.LOSS, Phase.GRADIENT, Phase.NORM, Phase.CLIPPED)


@dataclass(frozen=True)
class Rounding:
    """How far a strategy is from one process in the configured precision."""

    precision: str
    gap: float  # of losses, relative
    floor: float  # how far one process is from itself, with each weight moved by the last bit
    first: Margin | None  # what rounding does not explain
    nearest: dict[str, Margin]  # to its limit, of each phase
    wider: str = ""  # a module that gives wider numbers than on one process, and on which ranks

    @property
    def explains(self) -> bool:
        """Is all that differs of the kind that rounding makes?"""
        return self.first is None and not self.wider

    def __str__(self) -> str:
        return f"{self.precision} gap {self.gap:.1e} (noise floor {self.floor:.1e})"


def compare_in_precision(plain: TrainingRecord, record: TrainingRecord, precision: str) -> Comparison:
    """What in a record is further from the reference's than rounding takes it, however far that is."""
    tolerances = TOLERANCES[precision]._replace(excused=inf, excused_beside=inf)
    comparison = compare(plain, record, tolerances, max_differences=len(plain.values))
    widths = record.facts.get("widths", {})
    wider = [name for name, width in plain.facts.get("widths", {}).items() if widths.get(name, 0) > width]
    return comparison._replace(wider=tuple(wider))


def judge_rounding(
    precision: str, plain: TrainingRecord, comparisons: Sequence[Comparison], curves: Sequence[Sequence[float]]
) -> Rounding:
    """What the comparisons of all ranks in a precision mean. curves: the losses of one process, and of the strategy."""
    differences = {difference.key: difference for comparison in comparisons for difference in comparison.differences}
    seen = {key for comparison in comparisons for key in comparison.seen}
    unexplained = []
    for _, group in groupby(plain.values, key=lambda key: (key.step, key.phase)):
        keys = [key for key in group if key in seen]
        differing = [key for key in keys if key in differences]
        if len(differing) >= _MANY * len(keys) and any(key in differences for key in keys[:_FIRST]):
            unexplained += [differences[key] for key in differing]
    first = None
    if unexplained:
        earliest = min(unexplained, key=lambda difference: difference.at)
        key = earliest.key
        first = Margin(0.0, earliest.gap, earliest.floor, key.step, key.phase, key.name)
    wider = next((comparison.wider[0] for comparison in comparisons if comparison.wider), None)
    ranks = [str(rank) for rank, comparison in enumerate(comparisons) if wider in comparison.wider]
    where = "" if wider is None else f"{wider or 'the output of the network'}, rank {', '.join(ranks)}"
    floor = plain.facts["floor"]
    return Rounding(precision, curve_gap(*curves), floor, first, nearest_to_limits(comparisons), where)


def loss_curve(record: TrainingRecord) -> list[float]:
    """The loss of each step."""
    keys = [key for key in record.values if key.phase == Phase.LOSS and key.name == "loss"]
    tables = map(record.table, keys)
    return [float("nan") if table[0, PATTERN] else float(table[0, FIRST]) for table in tables]


def curve_gap(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference of two curves, relative to the first."""
    return max(abs(x - y) / max(abs(x), 1e-30) for x, y in zip(first, second, strict=True))


def curve_noise_floor(curve: Sequence[float], perturbed: Sequence[float], precision: str) -> float:
    """How far a curve is from itself with weights moved by a last bit, and no less than one last bit."""
    return max(curve_gap(curve, perturbed) / PERTURBED_BITS[precision], LAST_BIT[precision])


def narrowing_keys(run: PreparedRun) -> str:
    """What of the strategy is narrower than the precision of the run, as its keys say."""
    return " ".join(
        f"strategy.{name}={value}" for name in run.strategy.narrowing if (value := getattr(run.strategy, name))
    )


def explain_precision(rounding: Rounding, narrowing: str) -> str:
    """The cause where fp64 is the same, and the precision of the run is not. narrowing: keys without which it is."""
    precision = rounding.precision
    if narrowing:
        return f"{narrowing}, which is narrower than precision={precision}; without it the strategy trains the same"
    if rounding.first is None:
        return f"not known: in fp64 the strategy trains the same. There this module computes outside of {precision}"
    return (
        f"not known: in fp64 the strategy trains the same. Something in it is narrower than {precision}, or scales"
        f" otherwise there; or sums in {precision} in another order are more than this network bears"
    )
