"""The types of the framework's keys: ranges, and the few kinds of value that have a grammar of their own.

`Annotated[float, Validator(parse_seconds)]` in schema.py is a key whose value `parse_seconds` reads. Who cannot take a
value raises a Refusal that says what is expected, as a sentence without its subject.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from trainer.launch.launcher_environment import read_init_method
from trainer.launch.typed_values import Validator, convert, is_valid, require
from trainer.learning.intervals import Interval
from trainer.learning.parameter_patterns import Rule

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # seconds


def at_least(least: int) -> Validator:
    """Whole numbers from this one on; torch keeps them in 64 bits."""

    def read(value: Any) -> int:
        # torch, numpy and JSON readers keep whole numbers in 64 bits
        return int(
            require(value, is_valid(value, int) and least <= value < 2**63, f"a whole number of at least {least}")
        )

    return Validator(read)


def not_empty(value: Any) -> str:
    """A text that names something: not the empty one."""
    return require(convert(value, str), value != "", "text")


def positive(value: Any) -> float:
    """A number above 0."""
    return require(convert(value, float), value > 0, "a number above 0")


def not_negative(value: Any) -> float:
    """A number from 0 on."""
    return require(convert(value, float), value >= 0, "a number from 0 on")


def fraction(value: Any) -> float:
    """A part of something, less than all of it."""
    return require(convert(value, float), 0 <= value < 1, "a number from 0 on and below 1")


def parse_seconds(value: Any) -> float:
    """A span of time: seconds, 90s, 15min, 2h, 1d or HH:MM:SS."""
    seconds: Any = _span(value) if isinstance(value, str) else value
    is_time = is_valid(seconds, float) and 0 < seconds < math.inf
    return float(require(seconds, is_time, "a time above 0: seconds, 90s, 15min, 2h or HH:MM:SS"))


def _span(written: str) -> float | None:
    # HH:MM:SS, as Slurm writes a time limit
    if clock := re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", written):
        return 3600.0 * int(clock[1]) + 60.0 * int(clock[2]) + int(clock[3])
    # 90s, 15min, 2h, 1d; also 1.5h
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", written)
    return float(counted[1]) * _UNITS[counted[2]] if counted else None


def parse_intervals(value: Any) -> tuple[Interval, ...]:
    """When something comes round: steps (500), epochs (1ep), time (15min), a list of them, or never (null)."""
    if value is None:
        return ()
    return tuple(_every(part) for part in value) if isinstance(value, list) else (_every(value),)


def parse_step_intervals(value: Any) -> tuple[Interval, ...]:
    """The same without a clock, which differs from rank to rank."""
    intervals = parse_intervals(value)
    expected = "steps (500), epochs (1ep), a list of them, or null for never"
    return require(intervals, all(every.seconds is None for every in intervals), expected)


def _every(value: Any) -> Interval:
    if epochs := re.fullmatch(r"0*([1-9]\d*)ep", str(value)):  # 3ep
        return Interval(epochs=int(epochs[1]))
    if isinstance(value, str) and (span := _span(value)):  # 15min
        return Interval(seconds=span)
    counted = is_valid(value, int) and value >= 1  # 500: steps
    expected = "steps (500), epochs (1ep), time (15min), a list of them, or null for never"
    return Interval(steps=int(require(value, counted, expected)))


def parse_window(value: Any) -> tuple[int, int] | None:
    """Steps to trace: the first and the last of them; true: 10 to 12; false: none."""
    if isinstance(value, bool):
        return (10, 12) if value else None  # late enough for warm caches, early enough to wait for
    in_order = is_valid(value, tuple[int, int]) and 2 <= value[0] <= value[1]
    expected = "true, false or [first,last]; the first is 2 or more: the step before it warms the profiler up"
    first, last = require(value, in_order, expected)
    return int(first), int(last)


def parse_rules(value: Any) -> tuple[Rule, ...]:
    """Parameters by pattern with a rate or a decay of their own: a list of {pattern: …, lr: …, weight_decay: …}."""
    right = isinstance(value, list) and all(_is_rule(each) for each in value)
    expected = (
        "a list like [{pattern: backbone, lr: 1e-4}]: each with a pattern, and lr, weight_decay or both, 0 or more"
    )
    return tuple(Rule(**each) for each in require(value, right, expected))


def _is_rule(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("pattern"), str):
        return False
    # what is not the pattern must be a rate, a decay, or both
    numbers = {key: number for key, number in value.items() if key != "pattern"}
    known = bool(numbers) and numbers.keys() <= {"lr", "weight_decay"}
    return known and all(is_valid(number, float) and 0 <= number < math.inf for number in numbers.values())


def parse_init_method(value: Any) -> str:
    """Where processes meet: env://, tcp://host:port or file:///path."""
    # only checked here; the launch reads it again, with what the launcher says
    read_init_method(str(value))
    return str(value)


def parse_packages(value: Any) -> tuple[str, ...]:
    """A list of names of Python packages."""
    # the first part of a dotted name: whole packages are trusted, not modules of them
    names = isinstance(value, list) and all(isinstance(name, str) and name.isidentifier() for name in value)
    return tuple(require(value, names, "a list of packages, like [monai]"))


# Of each the function decides; the type is what a field holds afterwards.
Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Fraction = Annotated[float, Validator(fraction)]
Positive = Annotated[float, Validator(positive)]
NonNegative = Annotated[float, Validator(not_negative)]
Seconds = Annotated[float, Validator(parse_seconds)]
NonEmpty = Annotated[str, Validator(not_empty)]
Intervals = Annotated[tuple[Interval, ...], Validator(parse_intervals)]
StepIntervals = Annotated[tuple[Interval, ...], Validator(parse_step_intervals)]
ProfileWindow = Annotated[tuple[int, int] | None, Validator(parse_window)]  # first and last step
Rules = Annotated[tuple[Rule, ...], Validator(parse_rules)]
InitMethod = Annotated[str, Validator(parse_init_method)]
Packages = Annotated[tuple[str, ...], Validator(parse_packages)]


def epochs_hint(value: Any) -> str:
    """What to do where epochs (1ep) were given to a key that counts steps."""
    epochs = re.search(r"\b\d+ep\b", str(value))
    return "; count in optimizer steps: an epoch has (training samples ÷ loop.global_batch) of them" if epochs else ""
