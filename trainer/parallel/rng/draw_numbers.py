"""Which draw of a forward it is: (the unit that runs, the number of its call, the number of the draw in it)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.data.rng import to_int64
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.module_units import ancestors, find_units

# calls of a unit are so far apart, what is drawn in one and after it, and draws
_CALL, _AFTER, _DRAW = 0xD6E8FEB86659FD93, 0x9E6C63D0676A9A99, 0xA0761D6478BD642F


def inside_unit(unit: int, call: int) -> int:
    """The place of what is drawn in a call of a unit, the first of which is 1."""
    return unit + call * _CALL


def after_unit(unit: int, call: int) -> int:
    """The place of what is drawn between the end of this call and the next unit."""
    return unit + call * _CALL + _AFTER


def draw_number(place: int, count: int) -> int:
    """The number of a draw at a place, an int64; its first draw has count 1."""
    return to_int64(place + count * _DRAW)


class DrawNumbers:
    """Counts the draws of one forward. Recomputing, micro-batches, stages and ranks give a draw the same number.

    What the network draws between two units is counted from the end of the one before: a pipeline's stage runs the
    network's own code, and sees units begin and end whose values another stage has.
    """

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()  # by unit
        self.unit = 0  # that was called last
        self._place, self._line, self._count = 0, 0, 0

    def begin(self, unit: int) -> None:
        """A unit is called."""
        self.unit = unit
        self.calls[unit] += 1
        self._place, self._line, self._count = inside_unit(unit, self.calls[unit]), inside_unit(unit, 0), 0

    def end(self, unit: int) -> None:
        """Its call has ended."""
        self._place, self._line, self._count = after_unit(unit, self.calls[unit]), after_unit(unit, 0), 0

    def next(self) -> tuple[int, int]:
        """The number of the next draw, and that of its place in the unit's code, which all calls share."""
        self._count += 1
        return draw_number(self._place, self._count), draw_number(self._line, self._count)


def unit_names(network: nn.Module, plan: Plan) -> list[str]:
    """The units by which draws are counted; what of the network lies in none counts by its children.

    They follow from the network and its plan alone, whatever a run uses units for.
    """
    units: list[str] = []
    with suppress(Refusal):  # of a plan that cannot be; who shards by it says so
        units = find_units(network, plan)
    above = {name for unit in units for name in ancestors(unit)} | {*units}
    return [*units, *(name for name, _ in network.named_children() if name not in above)]


def hash_name(name: str) -> int:
    """A name as a number of 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def watch_units(network: nn.Module, names: Iterable[str], numbers: Callable[[], DrawNumbers]) -> list[RemovableHandle]:
    """Let units tell where they begin and end. numbers: called for the forward that is under way."""

    def begins(unit: int, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # nobody asks for names in a graph: see `GraphDraws`
            numbers().begin(unit)

    def ends(unit: int, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            numbers().end(unit)

    hooks = list[RemovableHandle]()
    for name in names:
        module = network.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(begins, hash_name(name))))
        hooks.append(module.register_forward_hook(partial(ends, hash_name(name))))
    return hooks
