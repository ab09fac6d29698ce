"""What one value may be: what an annotation asks for, and the few kinds of value that have a grammar of their own."""

from __future__ import annotations

import enum
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from trainer.launch.address import meeting
from trainer.learning.cadence import Every
from trainer.refusal import Refusal

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # seconds
_LISTS = (list, set, frozenset, Sequence, Iterable)
# No yaml can hold these. By name, because torch is not imported before a command line has been composed.
_OBJECTS = {"torch.Tensor", "torch.nn.modules.module.Module"}
_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a section",
}


class Unexpected(Exception):
    """The value is not of this kind; the message says what is expected."""


def fits(value: Any, annotation: Any) -> bool:
    """Can this value, out of a yaml, be what the annotation asks for? Yes where one cannot know."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # an object that is still to be built
    # What holds other types is asked for each of them.
    if annotation in (None, type(None)):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is typing.Annotated:
        return fits(value, args[0])
    if origin in _LISTS or annotation in _LISTS:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value if args)
    if origin is tuple or annotation is tuple:
        return isinstance(value, list) and _fits_tuple(value, args)
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return isinstance(value, Mapping)
    return _fits_class(value, annotation)


def _fits_tuple(value: list, args: tuple) -> bool:
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    return not args or (len(value) == len(args) and all(map(fits, value, args)))


def _fits_class(value: Any, annotation: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)  # to Python true is a 1
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return number and float(value).is_integer()  # 1e4 is a float to yaml
    if annotation is float:
        return number
    if annotation in (str, Path):  # run.name=2024
        return number or isinstance(value, str)
    if not isinstance(annotation, type) or annotation in (object, inspect.Parameter.empty):
        return True  # says too little to refuse anything: a type variable, a protocol's alias
    if any(f"{kind.__module__}.{kind.__name__}" in _OBJECTS for kind in annotation.__mro__):
        return False
    if issubclass(annotation, enum.Enum):
        return isinstance(value, str | int | annotation)
    return value is not None


def describe(annotation: Any) -> str:
    """What the annotation asks for, in a user's words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(each) for each in args if getattr(each, "__name__", "") != "Tensor"))
    if origin is Literal:
        return "one of " + ", ".join(str(each) for each in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}"
    if origin in (*_LISTS, tuple) or annotation in (*_LISTS, tuple):
        return "a list" + ({int: " of whole numbers", float: " of numbers"}.get(args[0], "") if args else "")
    return _PLAIN.get(annotation) or str(getattr(annotation, "__name__", annotation))


def converted(value: Any, annotation: Any) -> Any:
    """The value as the annotation has it where yaml has no such type: tuples, paths, text that looks like a number."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        # 3 for int | str stays what it is; 3 for tuple | str becomes the first that it can be
        fitting = [each for each in args if fits(value, each)]
        exact = [each for each in fitting if type(value) is each]
        return value if exact or not fitting else converted(value, fitting[0])
    if isinstance(value, list) and (origin is tuple or annotation is tuple):
        return tuple(value)
    if annotation is Path and isinstance(value, str | int | float):
        return Path(str(value))
    if annotation in (int, float, str) and isinstance(value, int | float) and not isinstance(value, bool):
        return annotation(value)
    return value


def seconds(value: Any) -> float:
    """A span of time: seconds, 90s, 15min, 2h, 1d or HH:MM:SS."""
    if isinstance(value, str):
        value = _span(value)
    if not fits(value, float) or not 0 < value < math.inf:
        raise Unexpected("a time above 0: seconds, 90s, 15min, 2h or HH:MM:SS")
    return float(value)


def _span(written: str) -> float | None:
    if clock := re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", written):
        return 3600.0 * int(clock[1]) + 60.0 * int(clock[2]) + int(clock[3])
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", written)
    return float(counted[1]) * _UNITS[counted[2]] if counted else None


def positive(value: Any) -> float:
    """A number above 0."""
    if not fits(value, float) or not value > 0:
        raise Unexpected("a number above 0 or null")
    return float(value)


def rhythm(value: Any) -> tuple[Every, ...]:
    """When something comes round: steps (500), epochs (1ep), time (15min), a list of them, or never (null)."""
    if value is None:
        return ()
    return tuple(_every(part) for part in value) if isinstance(value, list) else (_every(value),)


def _every(value: Any) -> Every:
    if epochs := re.fullmatch(r"0*([1-9]\d*)ep", str(value)):
        return Every(epochs=int(epochs[1]))
    if isinstance(value, str) and (span := _span(value)):
        return Every(seconds=span)
    if fits(value, int) and value >= 1:
        return Every(steps=int(value))
    raise Unexpected("steps (500), epochs (1ep), time (15min), a list of them, or null for never")


def window(value: Any) -> tuple[int, int] | None:
    """Steps to trace: the first and the last of them; true: 10 to 12; false: none."""
    if isinstance(value, bool):
        return (10, 12) if value else None
    if fits(value, tuple[int, int]) and 2 <= value[0] <= value[1]:
        return int(value[0]), int(value[1])
    raise Unexpected("true, false or [first,last]; the first is 2 or more: the step before it warms the profiler up")


def meeting_place(value: Any) -> str:
    """Where processes meet: env://, tcp://host:port or file:///path."""
    try:
        meeting(str(value))
    except Refusal as refusal:
        raise Unexpected(str(refusal)) from None
    return str(value)


def packages(value: Any) -> tuple[str, ...]:
    """A list of names of Python packages."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise Unexpected("a list of packages, like [monai]")
    return tuple(value)


def below(written: Any, key: Any) -> Any:
    """A part of a node as it was written; all that was written where one interpolation stands for the node."""
    return written[key] if isinstance(written, dict | list) else written


def shown(written: Any) -> str:
    """A value as it was written, short enough for a line; an interpolation stays one, so that no secret is shown."""
    word = "null" if written is None else str(written).lower() if isinstance(written, bool) else str(written)
    return word if len(word) <= 80 else word[:77] + "..."


def in_steps(value: Any) -> str:
    """What to do where epochs (1ep) were given to a key that counts steps."""
    epochs = re.search(r"\b\d+ep\b", str(value))
    return "; count in optimizer steps: an epoch has (training samples ÷ loop.global_batch) of them" if epochs else ""
