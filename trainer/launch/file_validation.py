"""What the small files of a run must look like before anybody goes by them: how large, which fields, of which kind.

Fields that are not named here may be there, as a later version may write more of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.launch.run_files import open_file
from trainer.messages import escape_line

_BYTES = 2**23  # of a JSON file that is read: in memory it takes up to 25 times as much
_YAML_BYTES = 2**20  # yaml is a hundred times slower
_DEPTH = 40  # of mappings and lists in each other
_WHOLE = 2**53  # what JSON keeps exactly

# (value, its name) → nothing; Damaged with the name where the value is of another kind
Kind = Callable[[Any, str], None]


class Damaged(Exception):
    """A file that is not as the program writes it; the message names the file, the field and what is wrong."""

    def __init__(self, said: str) -> None:
        super().__init__(escape_line(said))  # names of files and of fields are in it, which others have chosen


def whole(value: Any, where: str) -> None:
    """A number of steps, samples, bytes …"""
    if type(value) is not int or not 0 <= value <= _WHOLE:
        raise _wrong(where, value, f"a whole number from 0 to {_WHOLE:,}")


def number(value: Any, where: str) -> None:
    """Any number; NaN and infinity are numbers, too."""
    if type(value) not in (int, float):
        raise _wrong(where, value, "a number")


def finite(value: Any, where: str) -> None:
    """A finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(where, value, "a finite number")


def text(value: Any, where: str) -> None:
    """Any text."""
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")


def texts(value: Any, where: str) -> None:
    """A list of texts."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(where, value, "a list of texts")


def matching(pattern: str) -> Kind:
    """A text of this form."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise _wrong(where, value, f"a text of the form {pattern}")

    return check


def optional(kind: Kind) -> Kind:
    """null, or this."""
    return lambda value, where: None if value is None else kind(value, where)


def tree(value: Any, where: str) -> None:
    """A mapping of anything, not too deep for those that walk through it."""
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a mapping")
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        inner = [list(one.values()) if isinstance(one, Mapping) else one for one in level]
        level = [each for values in inner for each in values if isinstance(each, (Mapping, list))]
    if level:
        raise Damaged(f"{_named(where)} is nested more than {_DEPTH} deep")


def every(key: Kind, kind: Kind) -> Kind:
    """A mapping whose keys and values are all of these kinds."""

    def check(value: Any, where: str) -> None:
        tree(value, where)
        for name, one in value.items():
            key(name, f"a name in {where}")
            kind(one, f"{where}.{name}")

    return check


def fields(needed: Mapping[str, Kind], more: Mapping[str, Kind] | None = None) -> Kind:
    """A mapping that has the needed fields; these, and others that are named, are of their kinds."""
    kinds = {**needed, **(more or {})}

    def check(value: Any, where: str) -> None:
        tree(value, where)
        for name, kind in kinds.items():
            if name in value:
                kind(value[name], _below(where, name))
            elif name in needed:
                raise Damaged(f"{_below(where, name)} is missing")

    return check


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _named(where: str) -> str:
    return where or "what it holds"


def _wrong(where: str, value: Any, wanted: str) -> Damaged:
    found = f"{type(value).__name__}" if isinstance(value, (Mapping, list)) else repr(value)[:80]
    return Damaged(f"{_named(where)} is {found}, not {wanted}")


def read_json(path: Path, kind: Kind) -> tuple[dict[str, Any], bytes]:
    """What a JSON file says, and its bytes. Damaged where it is too large or of another kind; OSError if unreadable."""
    data = _bytes(path, _BYTES)
    return _checked(path, lambda: json.loads(data), kind), data


def read_yaml(path: Path, kind: Kind) -> dict[str, Any]:
    """The same of a YAML file, as plain data. References to other places in it, which can make a bomb, are refused."""
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it refers to other places in it (*name), which this program never writes")
            return super().compose_node(parent, index)

    data = _bytes(path, _YAML_BYTES)
    return _checked(path, lambda: yaml.load(data, Plain), kind)


def readable(data: bytes, name: str) -> bytes:
    """The bytes of a JSON file that is to be written. Damaged where `read_json` would find it too large later."""
    if len(data) > _BYTES:
        raise Damaged(f"{name} would have {len(data):,} bytes; only {_BYTES:,} are read: the configuration is too long")
    return data


def _bytes(path: Path, most: int) -> bytes:
    with open_file(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Damaged(f"{path}: larger than {most:,} bytes")
    return data


def _checked(path: Path, parse: Callable[[], Any], kind: Kind) -> dict[str, Any]:
    from yaml import YAMLError

    try:
        said = parse()
        kind(said, "")
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None
    except (ValueError, YAMLError, RecursionError) as error:
        raise Damaged(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    return said


def _progress(value: Any, where: str) -> None:
    """Counts that can be true together: each step is of a sample or more, each epoch of a step or more."""
    counts = dict.fromkeys(("step", "epoch", "position", "samples"), whole)
    fields(counts, {"owed": optional(whole), **dict.fromkeys(("stale", "rollbacks", "left_out"), whole)})(value, where)
    for small, large in (("epoch", "step"), ("step", "samples"), ("position", "samples")):
        # what was passed over in going back moved epoch and position without a step
        if value[small] > value[large] + value.get("left_out", 0) * (small != "step"):
            raise Damaged(f"{where}.{small} is {value[small]:,}, more than {where}.{large}, {value[large]:,}")


_set = fields({"samples": whole, "fingerprint": text})

_seconds = every(text, finite)

STATUS = fields(
    {"state": matching("running|completed|preempted|failed"), "step": whole},
    {
        **dict.fromkeys(("resume_step", "attempt", "first_step", "pid"), whole),
        **dict.fromkeys(("goodput", "executed", "time", "step_s"), finite),
        "seconds": _seconds,
        **dict.fromkeys(("reason", "strategy", "host"), optional(text)),
        **dict.fromkeys(("root_rank", "world_size"), optional(whole)),
    },
)
_left = fields({"state": text, "step": whole}, {"reason": optional(text), "time": finite, "seconds": _seconds})
START = fields(
    {"attempt": whole, "began": finite, "resume_step": whole},
    {"before": optional(_left)},
)
MANIFEST = fields(
    {
        "format": whole,
        "step": whole,
        "figures": every(text, number),
        # names of files in the folder: none leads out of it
        "files": every(
            matching(r"[^/\\\x00-\x1f\x7f-\x9f]{1,255}"), fields({"size": whole, "sha256": matching("[0-9a-f]{64}")})
        ),
        "sha256": text,
    },
    {"world_size": whole, "strategy": text, "precision": text},
)
STATE = fields(
    {},
    {
        "progress": _progress,
        "data": fields({"training": _set, "evaluation": _set}, {"classes": texts}),
        "horizon": whole,
        "precision": text,
        **dict.fromkeys(("schedule", "configuration"), tree),
    },
)
CONFIG = fields({}, {"checkpoint": fields({}, {"best": optional(text)})})
ENVIRONMENT = fields({}, {"precision": text, "horizon": whole, "best": text})
