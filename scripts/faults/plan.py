"""Which faults strike, and after which steps: drawn from a seed, so that a run of them can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from random import Random


@dataclass(frozen=True)
class Fault:
    """What strikes once this step has been logged."""

    step: int
    kind: str


def draw(steps: int, count: int, kinds: Sequence[str], seed: int) -> list[Fault]:
    """So many faults over so many steps, about equally far apart; every kind strikes before one strikes again."""
    random, apart = Random(seed), steps / max(1, count)
    rounds = chain.from_iterable(random.sample(list(one), len(one)) for one in repeat(kinds))
    # the middle half of each stretch: two faults are never closer than half a stretch, and the last is not at the end
    places = [int(apart * (number + random.uniform(0.25, 0.75))) for number in range(count)]
    return [Fault(max(1, step), kind) for step, kind in zip(places, islice(rounds, count), strict=True)]
