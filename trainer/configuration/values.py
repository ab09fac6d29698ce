"""What one value may be: a reader takes it as yaml or the command line gave it, or says what it expects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from trainer.cadence import Every
from trainer.meeting import meeting
from trainer.refusal import Refusal

Reader = Callable[[Any], Any]

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # seconds


class Unexpected(Exception):
    """The value is not of this kind; the message says what is expected."""


def truth(value: Any) -> bool:
    """Yes or no; nothing else stands for them."""
    if not isinstance(value, bool):
        raise Unexpected("true or false")
    return value


def text(value: Any) -> str:
    """A word or a path. A number is taken as it was written: folders may be called 7."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise Unexpected("text")
    return str(value)


def whole(least: int) -> Reader:
    """A whole number, not below the least."""

    def read(value: Any) -> int:
        number = int(value) if isinstance(value, float) and value.is_integer() else value  # 1e4 is a float to yaml
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number < 2**63:
            raise Unexpected(f"a whole number of at least {least}")
        return number

    return read


def number_above(bound: float) -> Reader:
    """A number greater than the bound."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not bound < value < math.inf:
            raise Unexpected(f"a number above {bound:g}")
        return float(value)

    return read


def one_of(*words: str) -> Reader:
    """One of a few words."""

    def read(value: Any) -> str:
        if value not in words:
            raise Unexpected("one of " + ", ".join(words))
        return value

    return read


def optional(reader: Reader) -> Reader:
    """Null, or what the reader takes."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        try:
            return reader(value)
        except Unexpected as unexpected:
            raise Unexpected(f"{unexpected}, or null") from None

    return read


def seconds(value: Any) -> float:
    """A span of time: seconds, 90s, 15min, 2h, 1d or HH:MM:SS."""
    if isinstance(value, str):
        value = _span(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Unexpected("a time above 0: seconds, 90s, 15min, 2h or HH:MM:SS")
    return float(value)


def _span(written: str) -> float | None:
    clock = re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", written)
    if clock:
        hours, minutes, rest = (int(part) for part in clock.groups())
        return hours * 3600.0 + minutes * 60.0 + rest
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", written)
    return float(counted[1]) * _UNITS[counted[2]] if counted else None


def rhythm(value: Any) -> tuple[Every, ...]:
    """When something comes round: steps (500), epochs (1ep), time (15min), a list of them, or never (null)."""
    if value is None:
        return ()
    return tuple(_every(part) for part in value) if isinstance(value, list) else (_every(value),)


def _every(value: Any) -> Every:
    try:
        if isinstance(value, str):
            epochs = re.fullmatch(r"(\d+)ep", value)
            return Every(epochs=whole(1)(int(epochs[1]))) if epochs else Every(seconds=seconds(value))
        return Every(steps=whole(1)(value))
    except Unexpected:
        raise Unexpected("steps (500), epochs (1ep), time (15min), a list of them, or null for never") from None


def window(value: Any) -> tuple[int, int] | None:
    """Steps to trace: the first and the last of them; true: 10 to 12; false: none."""
    if isinstance(value, bool):
        return (10, 12) if value else None
    if isinstance(value, list) and len(value) == 2 and all(type(step) is int for step in value):
        first, last = value
        if 2 <= first <= last:
            return first, last
    raise Unexpected("true, false or [first,last]; the first is 2 or more: the step before it warms the profiler up")


def meeting_place(value: Any) -> str:
    """Where processes meet: env://, tcp://host:port or file:///path."""
    written = text(value)
    try:
        meeting(written)
    except Refusal as refusal:
        raise Unexpected(str(refusal)) from None
    return written


def packages(value: Any) -> tuple[str, ...]:
    """A list of names of Python packages."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise Unexpected("a list of packages, like [monai]")
    return tuple(value)
