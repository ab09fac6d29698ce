"""What stands in a checkpoint folder and how it is verified, before a single byte of a tensor is used.

Nothing here runs code that a file names: JSON and safetensors only, no pickle.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
FORMAT = 1  # of manifest.json
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileFact:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says: it is written last, so a folder that has one was written to the end."""

    path: Path
    step: int
    facts: dict[str, Any]  # world_size, strategy, …
    figures: dict[str, float]  # of the last evaluation of these weights; empty where there was none
    files: dict[str, FileFact]


def encode(value: Any) -> bytes:
    """Strict JSON: no NaN (a number that is not finite becomes {"$float": "nan"}), string keys, nothing but data."""
    return json.dumps(_strict(value, ""), indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def decode(data: bytes) -> Any:
    """The inverse of `encode`. ValueError where it is not strict JSON, or a key stands twice."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, with a digest over themselves: a flipped bit in a figure must show too."""
    said = {
        "format": FORMAT,
        "step": manifest.step,
        **manifest.facts,
        "figures": manifest.figures,
        "files": {name: vars(fact) for name, fact in sorted(manifest.files.items())},
    }
    return encode({**said, "sha256": hashlib.sha256(encode(said)).hexdigest()})


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json alone, which is cheap. CorruptCheckpoint where it is missing or not as it was written."""
    where = folder / MANIFEST
    if folder.is_symlink() or not folder.is_dir():
        raise CorruptCheckpoint(f"{folder}: not a folder")
    _regular(where)
    data = where.read_bytes()
    try:
        said = decode(data)
        if encode(said) != data:  # a change that JSON does not notice is a change all the same
            raise ValueError("not as it was written")
        digest = said.pop("sha256")
        if hashlib.sha256(encode(said)).hexdigest() != digest:
            raise ValueError("SHA-256 differs")
        if said.pop("format") != FORMAT:
            raise ValueError(f"a format other than {FORMAT}, which this version reads")
        step, figures = said.pop("step"), said.pop("figures")
        files = {name: FileFact(fact["size"], fact["sha256"]) for name, fact in said.pop("files").items()}
        return Manifest(folder, _count(step), said, dict(figures), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{where}: {_reason(error)}") from None


def check_names(manifest: Manifest) -> None:
    """Every file there with its size, none besides, all of them plain files."""
    folder, expected = manifest.path, {MANIFEST, *manifest.files}
    for name, fact in manifest.files.items():
        if not _NAME.fullmatch(name) or not (name == STATE or name.endswith(TENSORS)):
            raise CorruptCheckpoint(f"{folder / MANIFEST}: {name!r} is no name of a checkpoint's file")
        size = _regular(folder / name)
        if size != fact.size:
            raise CorruptCheckpoint(f"{folder / name}: {size} bytes instead of {fact.size}")
    if STATE not in manifest.files:
        raise CorruptCheckpoint(f"{folder / MANIFEST}: does not list {STATE}")
    # file systems leave hidden files of their own (.nfs0000…)
    extra = {name for name in os.listdir(folder) if not name.startswith(".") or name.endswith(TENSORS)} - expected
    if extra:
        raise CorruptCheckpoint(f"{folder / min(extra)}: not in the manifest")


def check_digests(manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files whole and compare their SHA-256."""
    for name in names:
        if sha256_of(manifest.path / name) != manifest.files[name].sha256:
            raise CorruptCheckpoint(f"{manifest.path / name}: SHA-256 differs, the file was changed after it was saved")


def read_state(manifest: Manifest) -> dict[str, Any]:
    """state.json of a checkpoint."""
    where = manifest.path / STATE
    try:
        state = decode(where.read_bytes())
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: {_reason(error)}") from None
    if not isinstance(state, dict):
        raise CorruptCheckpoint(f"{where}: not a JSON object")
    return state


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def attempt(action: Callable[[], Any]) -> str | None:
    """Why a checkpoint is not usable, in words; None where the action finds nothing wrong."""
    try:
        action()
    except (CorruptCheckpoint, OSError) as error:
        return str(error)
    return None


def _regular(path: Path) -> int:
    """The size of a plain file; links and folders are refused, they may lead anywhere."""
    try:
        facts = path.lstat()
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise CorruptCheckpoint(f"{path}: not a plain file")
    return facts.st_size


def _strict(value: Any, where: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_strict(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and "$float" not in value:
        return {key: _strict(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"state{where}: {type(value).__name__} cannot be stored as JSON")


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(repr(key) for key, _ in pairs)[:200]}")
    if "$float" in found:
        if len(found) > 1 or found["$float"] not in _FLOATS:
            raise ValueError("an unknown $float")
        return _FLOATS[found["$float"]]
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"step is {value!r}")
    return value


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)[:300]
