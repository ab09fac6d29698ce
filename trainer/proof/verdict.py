"""What all ranks together have found, in words and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.proof.causes import First, Tried
from trainer.proof.comparison import Compared, Difference, Near, nearest
from trainer.proof.noise_floor import Rounding
from trainer.proof.record import FORWARD, GRADIENT, RESUME, STEP, UPDATE, Key, Record

_EVERY = (GRADIENT, STEP, UPDATE, RESUME)  # phases of which nothing may be missing on all ranks


@dataclass(frozen=True)
class Verdict:
    """Is the training the same? And if it is not, what differs first."""

    first: First | None
    gap: float  # the largest, relative to the norms
    gaps: dict[str, float]  # of each phase
    rows: Sequence[int]  # samples of the global batch that differ first
    cause: str = ""
    tried: Tried = field(default_factory=Tried)  # the experiments that it follows from
    others: Sequence[str] = ()  # what differs after it, in the order of time
    modules: tuple[int, int] = (0, 0)  # compared, of those that were called
    nearest: Mapping[str, Near] = field(default_factory=dict)  # to its limit, of each phase
    rounding: Rounding | None = None  # in the precision of the run, where that is another one
    precision: str = "fp64"  # in which all was compared

    @property
    def same(self) -> bool:
        """Does nothing differ, but for what rounding makes?"""
        return self.first is None and (self.rounding is None or self.rounding.explains)

    def data(self) -> dict[str, Any]:
        """For a file."""
        return {"same": self.same, **asdict(self)}


def judged(reference: Record, found: Sequence[Compared], resume: int) -> Verdict:
    """What the findings of all ranks mean, without a cause yet.

    resume: the step after which the run went on from a checkpoint.
    """
    gaps: dict[str, float] = {}
    for one in found:
        for phase, gap in one.gaps.items():
            gaps[phase] = max(gap, gaps.get(phase, 0.0))
    seen = {key for one in found for key in one.seen}
    by_key: dict[int, list[tuple[int, Difference]]] = {}
    for rank, one in enumerate(found):
        for difference in one.differences:
            by_key.setdefault(difference.at, []).append((rank, difference))
    keys = [*reference.values]
    held = {key for one in found for key in one.held}
    missing = [at for at, key in enumerate(keys) if key.phase in _EVERY and key not in held]
    forwards = {key.name for key in keys if key.phase == FORWARD}
    modules = len({key.name for key in seen if key.phase == FORWARD}), len(forwards)
    gap = max(gaps.values(), default=0.0)
    order = sorted({*by_key, *missing})
    if not order:
        return Verdict(None, gap, gaps, [], modules=modules, nearest=nearest(found))
    first = _first(keys[order[0]], by_key.get(order[0], []), found, resume)
    rows = sorted({row for _, one in by_key.get(order[0], []) for row in one.rows})
    others = [spoken(keys[at]) for at in order[1:8]]
    return Verdict(first, gap, gaps, rows, others=others, modules=modules, nearest=nearest(found))


def _first(key: Key, here: Sequence[tuple[int, Difference]], found: Sequence[Compared], resume: int) -> First:
    gap, ratio = max(((one.gap, one.ratio) for _, one in here), default=(1.0, 0.0))
    ranks = tuple(sorted({rank for rank, _ in here}))  # each once, in however many of its micro-batches
    others = sum(key in one.seen for one in found) - len(ranks)
    return First(key.step, key.phase, key.name, gap, ratio, ranks, others, key.step == resume + 1 > 1)


def spoken(key: Key) -> str:
    """What a key is of, in words."""
    call = f" (call {key.call + 1})" if key.call else ""
    where = f"step {key.step}, " if key.step else ""
    return f"{where}{key.phase}, {key.name or 'the output of the network'}{call}"


def difference(verdict: Verdict) -> str:
    """Where the first difference is, in words: what, on whom, how much."""
    first = verdict.first
    assert first is not None
    who = ""
    if not first.ranks:
        who = ", which no rank has"
    elif first.others:
        who = f", {'samples of ' if first.phase == FORWARD else ''}rank {', '.join(map(str, first.ranks))}"
    where = spoken(Key(first.step, first.phase, first.name))
    return f"{where}{who}, {first.gap:.1e}"
