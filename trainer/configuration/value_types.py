"""What one value may be: what an annotation asks for, and the few kinds of value that have a grammar of their own.

Who cannot take a value raises a Refusal that says what is expected, as a sentence without its subject.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from trainer.launch.launchers import meeting
from trainer.learning.cadence import Every
from trainer.learning.parameter_patterns import Rule
from trainer.messages import Refusal

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # seconds
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)
# No yaml can hold these. By name, because torch is not imported before a command line has been composed.
_OBJECTS = {"torch.Tensor", "torch.nn.modules.module.Module"}


class Written(NamedTuple):
    """Stands in an annotation: Annotated[float, Written(seconds)] is a number with a grammar of its own."""

    read: Callable[[Any], Any]


def converted(value: Any, annotation: Any) -> Any:
    """A value out of a yaml as the annotation has it, as it is where one cannot know. Refusal if it cannot be that."""
    origin, args = get_origin(annotation), get_args(annotation)
    kind = origin or annotation
    if isinstance(value, Mapping) and "_target_" in value:
        return value  # an object that is still to be built
    # What holds other types is asked for each of them, from the outside in.
    if kind in (Union, types.UnionType):
        return _any_of(value, args)
    if kind is Annotated:
        return args[1].read(value) if isinstance(args[1], Written) else converted(value, args[0])
    if kind is Literal:
        if value not in args:
            raise Refusal("one of " + ", ".join(str(each) for each in args))
        return value
    if kind in _LISTS:
        return _items(value, kind, args)
    if kind in (dict, Mapping):
        return _held(value, isinstance(value, Mapping), "a section")
    return _single(value, kind)


def _any_of(value: Any, kinds: Sequence[Any]) -> Any:
    """The value as one of these types, its own before others: 3 for int | str stays, for tuple | str it is a text."""
    # a 3 could be read as a text, too: only where its own type is not among them
    reasons = []
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):
        try:
            return converted(value, kind)
        except Refusal as refusal:
            reasons.append(str(refusal))
    raise Refusal(" or ".join(dict.fromkeys(filter(None, reasons))))


def _items(value: Any, kind: Any, args: Sequence[Any]) -> list | tuple:
    """A list with each of its items as the annotation has it; a tuple where it asks for one, yaml has none."""
    fixed = kind is tuple and args and args[-1] is not Ellipsis
    expected = f"a list of {len(args)}" if fixed else "a list"
    if not fixed and args:
        expected += {int: " of whole numbers", float: " of numbers"}.get(args[0], "")
    if not isinstance(value, list) or (fixed and len(value) != len(args)):
        raise Refusal(expected)
    # What is wrong with one item is said of the list: that is what the user wrote.
    each = args if fixed else [args[0] if args else Any] * len(value)
    try:
        items = [converted(item, wanted) for item, wanted in zip(value, each, strict=True)]
    except Refusal:
        raise Refusal(expected) from None
    return tuple(items) if kind is tuple else items


def _single(value: Any, kind: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)  # to Python true is a 1
    if kind in (None, type(None)):
        return _held(value, value is None, "null")
    if kind is bool:
        return _held(value, isinstance(value, bool), "true or false")
    if kind is int:  # 1e4 is a float to yaml
        return int(_held(value, number and (isinstance(value, int) or value.is_integer()), "a whole number"))
    if kind is float:
        return float(_held(value, number, "a number"))
    if kind in (str, Path):  # run.name=2024
        return kind(str(_held(value, number or isinstance(value, str), "text")))
    if not isinstance(kind, type) or kind in (object, Any, inspect.Parameter.empty):
        return value  # says too little to refuse anything: a type variable, a protocol's alias
    # of other classes a text may still become one, as a name does a torch.device: the callee will tell
    if any(f"{each.__module__}.{each.__name__}" in _OBJECTS for each in kind.__mro__):
        raise Refusal("" if kind.__name__ == "Tensor" else kind.__name__)
    return _held(value, value is not None, kind.__name__)


def fits(value: Any, annotation: Any) -> bool:
    """Can the value be what the annotation asks for?"""
    try:
        converted(value, annotation)
    except Refusal:
        return False
    return True


def _held(value: Any, holds: bool, expected: str) -> Any:
    if not holds:
        raise Refusal(expected)
    return value


def at_least(least: int) -> Written:
    """Whole numbers from this one on; torch keeps them in 64 bits."""

    def read(value: Any) -> int:
        return int(_held(value, fits(value, int) and least <= value < 2**63, f"a whole number of at least {least}"))

    return Written(read)


def word(value: Any) -> str:
    """A text that names something: not the empty one."""
    return _held(converted(value, str), value != "", "text")


def positive(value: Any) -> float:
    """A number above 0."""
    return _held(converted(value, float), value > 0, "a number above 0")


def not_negative(value: Any) -> float:
    """A number from 0 on."""
    return _held(converted(value, float), value >= 0, "a number from 0 on")


def fraction(value: Any) -> float:
    """A part of something, less than all of it."""
    return _held(converted(value, float), 0 <= value < 1, "a number from 0 on and below 1")


def seconds(value: Any) -> float:
    """A span of time: seconds, 90s, 15min, 2h, 1d or HH:MM:SS."""
    found: Any = _span(value) if isinstance(value, str) else value
    known = fits(found, float) and 0 < found < math.inf
    return float(_held(found, known, "a time above 0: seconds, 90s, 15min, 2h or HH:MM:SS"))


def _span(written: str) -> float | None:
    if clock := re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", written):
        return 3600.0 * int(clock[1]) + 60.0 * int(clock[2]) + int(clock[3])
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", written)
    return float(counted[1]) * _UNITS[counted[2]] if counted else None


def cadence(value: Any) -> tuple[Every, ...]:
    """When something comes round: steps (500), epochs (1ep), time (15min), a list of them, or never (null)."""
    if value is None:
        return ()
    return tuple(_every(part) for part in value) if isinstance(value, list) else (_every(value),)


def step_cadence(value: Any) -> tuple[Every, ...]:
    """The same without a clock, which differs from rank to rank."""
    found = cadence(value)
    expected = "steps (500), epochs (1ep), a list of them, or null for never"
    return _held(found, all(every.seconds is None for every in found), expected)


def _every(value: Any) -> Every:
    if epochs := re.fullmatch(r"0*([1-9]\d*)ep", str(value)):
        return Every(epochs=int(epochs[1]))
    if isinstance(value, str) and (span := _span(value)):
        return Every(seconds=span)
    counted = fits(value, int) and value >= 1
    expected = "steps (500), epochs (1ep), time (15min), a list of them, or null for never"
    return Every(steps=int(_held(value, counted, expected)))


def window(value: Any) -> tuple[int, int] | None:
    """Steps to trace: the first and the last of them; true: 10 to 12; false: none."""
    if isinstance(value, bool):
        return (10, 12) if value else None
    in_order = fits(value, tuple[int, int]) and 2 <= value[0] <= value[1]
    expected = "true, false or [first,last]; the first is 2 or more: the step before it warms the profiler up"
    first, last = _held(value, in_order, expected)
    return int(first), int(last)


def rules(value: Any) -> tuple[Rule, ...]:
    """Parameters by pattern with a rate or a decay of their own: a list of {pattern: …, lr: …, weight_decay: …}."""
    right = isinstance(value, list) and all(_is_rule(each) for each in value)
    expected = (
        "a list like [{pattern: backbone, lr: 1e-4}]: each with a pattern, and lr, weight_decay or both, 0 or more"
    )
    return tuple(Rule(**each) for each in _held(value, right, expected))


def _is_rule(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("pattern"), str):
        return False
    numbers = {key: number for key, number in value.items() if key != "pattern"}
    known = bool(numbers) and numbers.keys() <= {"lr", "weight_decay"}
    return known and all(fits(number, float) and 0 <= number < math.inf for number in numbers.values())


def meeting_place(value: Any) -> str:
    """Where processes meet: env://, tcp://host:port or file:///path."""
    meeting(str(value))
    return str(value)


def packages(value: Any) -> tuple[str, ...]:
    """A list of names of Python packages."""
    names = isinstance(value, list) and all(isinstance(name, str) and name.isidentifier() for name in value)
    return tuple(_held(value, names, "a list of packages, like [monai]"))


def shown(written: Any) -> str:
    """A value as it was written, short enough for a line; an interpolation stays one, so that no secret is shown."""
    word = "null" if written is None else str(written).lower() if isinstance(written, bool) else str(written)
    return word if len(word) <= 80 else word[:77] + "..."


def in_steps(value: Any) -> str:
    """What to do where epochs (1ep) were given to a key that counts steps."""
    epochs = re.search(r"\b\d+ep\b", str(value))
    return "; count in optimizer steps: an epoch has (training samples ÷ loop.global_batch) of them" if epochs else ""
