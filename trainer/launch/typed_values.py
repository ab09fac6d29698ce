"""Values checked against type annotations: keys of a configuration, and fields of the small files in a run's folder.

What people write in yaml is converted: 1e4 to an int, a list to a tuple. What programs wrote into a run's folder must
be exact, and a file may come from a stranger: its size, its depth and its references are bounded.

A value that does not fit is a Refusal that says what is expected, as a sentence without its subject. Nothing here needs
torch.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from trainer.launch.safe_files import open_file
from trainer.messages import Refusal, escape_line

_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)
# No yaml can hold these. By name, because torch is not imported before a command line has been composed.
_OBJECTS = {"torch.Tensor", "torch.nn.modules.module.Module"}


class Validator(NamedTuple):
    """Stands in an annotation: of `Annotated[float, Validator(parse_seconds)]` the function decides, not the type."""

    convert: Callable[[Any], Any]  # value → value as it is used; Refusal with what is expected


class InvalidField(Refusal):
    """A field of a mapping is missing, or its value does not fit."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"other fields: {path} {problem}")
        self.path, self.problem = path, problem


def convert(value: Any, annotation: Any) -> Any:
    """A value as the annotation has it; as it is where one cannot know. Refusal if it cannot be that."""
    origin, args = get_origin(annotation), get_args(annotation)
    kind = origin or annotation
    # What holds other types is asked for each of them, from the outside in.
    if kind in (Union, types.UnionType):
        return _convert_to_any_of(value, args)
    if kind is Annotated:
        return args[1].convert(value) if isinstance(args[1], Validator) else convert(value, args[0])
    if is_typeddict(kind):
        return _convert_fields(value, kind)
    # An object that is still to be built. Not before: no field of a file is one.
    if isinstance(value, Mapping) and "_target_" in value:
        return value
    if kind is Literal:
        words = (str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args)  # as yaml has them
        return require(value, value in args, f"one of {', '.join(words)}")
    if kind in _LISTS:
        return _convert_items(value, kind, args)
    if kind in (dict, Mapping):
        return require(value, isinstance(value, Mapping), "a section")
    return _convert_single(value, kind)


def is_valid(value: Any, annotation: Any) -> bool:
    """Can the value be what the annotation asks for?"""
    try:
        convert(value, annotation)
    except Refusal:
        return False
    return True


def require(value: Any, holds: bool, expected: str) -> Any:
    """The value; Refusal with what is expected where the condition does not hold."""
    if not holds:
        raise Refusal(expected)
    return value


def _convert_to_any_of(value: Any, kinds: Sequence[Any]) -> Any:
    """The value as one of these types, its own before others: 3 for int | str stays, for tuple | str it is a text."""
    # a 3 could be read as a text, too: only where its own type is not among them
    reasons = []
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):
        try:
            return convert(value, kind)
        except InvalidField:  # it says more than that the value is no mapping
            raise
        except Refusal as refusal:
            reasons.append(str(refusal))
    raise Refusal(" or ".join(dict.fromkeys(filter(None, reasons))))


def _convert_items(value: Any, kind: Any, args: Sequence[Any]) -> list | tuple:
    """A list with each of its items as the annotation has it; a tuple where it asks for one, yaml has none."""
    fixed = kind is tuple and args and args[-1] is not Ellipsis
    expected = f"a list of {len(args)}" if fixed else "a list"
    if not fixed and args:
        expected += {int: " of whole numbers", float: " of numbers"}.get(args[0], "")
    if not isinstance(value, list) or (fixed and len(value) != len(args)):
        raise Refusal(expected)
    # What is wrong with one item is said of the list: that is what the user wrote.
    item_types = args if fixed else [args[0] if args else Any] * len(value)
    try:
        items = [convert(item, item_type) for item, item_type in zip(value, item_types, strict=True)]
    except Refusal:
        raise Refusal(expected) from None
    return tuple(items) if kind is tuple else items


def _convert_fields(value: Any, kind: Any) -> dict[str, Any]:
    """A mapping that has the fields of a TypedDict. Others may be there: a later version may write more of them."""
    fields = dict(require(value, isinstance(value, Mapping), "a mapping"))
    for name, annotation in _field_types(kind).items():
        optional = get_origin(annotation) is NotRequired
        if name in fields:
            fields[name] = _convert_field(name, fields[name], get_args(annotation)[0] if optional else annotation)
        elif not optional:
            raise InvalidField(name, "is missing")
    return fields


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict; cached, because to evaluate its annotations takes longer than to check a value."""
    return get_type_hints(kind, include_extras=True)


def _convert_field(name: str, value: Any, annotation: Any) -> Any:
    try:
        return convert(value, annotation)
    except InvalidField as inner:
        raise InvalidField(f"{name}.{inner.path}".rstrip("."), inner.problem) from None
    except Refusal as expected:
        raise InvalidField(name, f"is {_brief(value)}, not {expected}") from None


def _brief(value: Any) -> str:
    return type(value).__name__ if isinstance(value, (Mapping, list)) else repr(value)[:80]


def _convert_single(value: Any, kind: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)  # to Python true is a 1
    if kind in (None, type(None)):
        return require(value, value is None, "null")
    if kind is bool:
        return require(value, isinstance(value, bool), "true or false")
    if kind is int:  # 1e4 is a float to yaml
        return int(require(value, is_number and (isinstance(value, int) or value.is_integer()), "a whole number"))
    if kind is float:
        return float(require(value, is_number, "a number"))
    if kind in (str, Path):  # run.name=2024
        return kind(str(require(value, is_number or isinstance(value, str), "text")))
    if not isinstance(kind, type) or kind in (object, Any, inspect.Parameter.empty):
        return value  # says too little to refuse anything: a type variable, a protocol's alias
    # of other classes a text may still become one, as a name does a torch.device: the callee will tell
    if any(f"{base.__module__}.{base.__name__}" in _OBJECTS for base in kind.__mro__):
        raise Refusal("" if kind.__name__ == "Tensor" else kind.__name__)
    return require(value, value is not None, kind.__name__)


# ------------------------------------------------------------------------------------- exact types, for fields of files

_WHOLE = 2**53  # what JSON keeps exactly
_LARGEST = sys.float_info.max  # a whole number of JSON may have hundreds of digits, with which nothing can count


def exactly(holds: Callable[[Any], bool], expected: str) -> Validator:
    """A value for which this holds; nothing is converted."""
    return Validator(lambda value: require(value, holds(value), expected))


def form(pattern: str) -> Validator:
    """A text of this form."""
    known = re.compile(pattern)
    return exactly(lambda text: isinstance(text, str) and bool(known.fullmatch(text)), f"a text of the form {pattern}")


def mapping_of(names: Any, values: Any) -> Validator:
    """A mapping whose names and values are all of these types."""

    def check(value: Any) -> dict[str, Any]:
        fields = require(value, isinstance(value, Mapping), "a mapping")
        for name in fields:
            try:
                convert(name, names)
            except Refusal as expected:
                raise InvalidField("", f"has the name {_brief(name)}, which is not {expected}") from None
        return {name: _convert_field(name, inner, values) for name, inner in fields.items()}

    return Validator(check)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


Whole = Annotated[  # of steps, samples, bytes …
    int, exactly(lambda value: type(value) is int and 0 <= value <= _WHOLE, f"a whole number from 0 to {_WHOLE:,}")
]
Number = Annotated[float, exactly(_is_number, "a number")]  # NaN and infinity are numbers, too
Finite = Annotated[float, exactly(lambda value: _is_number(value) and math.isfinite(value), "a finite number")]
Text = Annotated[str, exactly(lambda value: isinstance(value, str), "a text")]
Texts = Annotated[
    list[str],
    exactly(lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of texts"),
]
TensorShape = Annotated[
    list[int],
    exactly(
        lambda value: isinstance(value, list) and all(type(size) is int and 0 <= size <= _WHOLE for size in value),
        "a list of whole numbers",
    ),
]
Tree = Annotated[Mapping[str, Any], exactly(lambda value: isinstance(value, Mapping), "a mapping")]

# ------------------------------------------------------------------------------------------ the files in a run's folder

_JSON_BYTES = 2**23  # of a file that is read: in memory it takes up to 25 times as much
_YAML_BYTES = 2**20  # yaml is a hundred times slower
_DEPTH = 40  # of mappings and lists in each other: those that walk through them call themselves


class DamagedFile(Exception):
    """A file that is not as the program writes it; the message names the file, the field and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_line(message))  # names of files and of fields are in it, which others have chosen


def read_json(path: Path, kind: Any) -> tuple[dict[str, Any], bytes]:
    """What a JSON file says, with the fields of a TypedDict, and its bytes. DamagedFile, or OSError if unreadable."""
    data = _read_bytes(path, _JSON_BYTES)
    return _parse(path, lambda: json.loads(data), kind), data


def read_yaml(path: Path, kind: Any) -> dict[str, Any]:
    """The same of a YAML file, as plain data. References to other places in it, which can make a bomb, are refused."""
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it refers to other places in it (*name), which this program never writes")
            return super().compose_node(parent, index)

    data = _read_bytes(path, _YAML_BYTES)
    return _parse(path, lambda: yaml.load(data, Plain), kind)


def refuse_unreadable(data: bytes, name: str) -> None:
    """DamagedFile where a JSON file that is to be written would be too large for `read_json` later."""
    if len(data) > _JSON_BYTES:
        raise DamagedFile(
            f"{name} would have {len(data):,} bytes; only {_JSON_BYTES:,} are read: the configuration is too long"
        )


def check_fields(value: Any, kind: Any) -> dict[str, Any]:
    """Parsed data that has the fields of a TypedDict, and is not too deep to walk through. InvalidField otherwise."""
    level = [value] if isinstance(value, (Mapping, list)) else []
    for _ in range(_DEPTH):
        children = [list(node.values()) if isinstance(node, Mapping) else node for node in level]
        level = [child for nodes in children for child in nodes if isinstance(child, (Mapping, list))]
    if level:
        raise InvalidField("what it holds", f"is nested more than {_DEPTH} deep")
    try:
        return convert(value, kind)
    except InvalidField:
        raise
    except Refusal as expected:
        raise InvalidField("what it holds", f"is {_brief(value)}, not {expected}") from None


def _read_bytes(path: Path, most: int) -> bytes:
    with open_file(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DamagedFile(f"{path}: larger than {most:,} bytes")
    return data


def _parse(path: Path, parse: Callable[[], Any], kind: Any) -> dict[str, Any]:
    from yaml import YAMLError

    try:
        return check_fields(parse(), kind)
    except InvalidField as error:
        raise DamagedFile(f"{path}: {error.path} {error.problem}") from None
    except (ValueError, YAMLError, RecursionError) as error:
        raise DamagedFile(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
