"""What stands in a checkpoint folder and how it is verified, before a single byte of a tensor is used.

Nothing here runs code that a file names: JSON and safetensors only, no pickle.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
FORMAT = 1  # of manifest.json
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
    """The inverse of `encode`. ValueError where it is no JSON."""
    return json.loads(data, object_hook=lambda said: _FLOATS[said["$float"]] if "$float" in said else said)


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, with a SHA-256 over themselves: a flipped bit in a figure must show too."""
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
    try:
        data = where.read_bytes()
        said = decode(data)
        if encode(said) != data:  # a change that JSON does not notice is a change all the same
            raise ValueError("not as it was written")
        sha256 = said.pop("sha256")
        if hashlib.sha256(encode(said)).hexdigest() != sha256:
            raise ValueError("SHA-256 differs")
        if said.pop("format") != FORMAT:
            raise ValueError(f"a format other than {FORMAT}, which this version reads")
        step, figures = said.pop("step"), said.pop("figures")
        files = {name: FileFact(fact["size"], fact["sha256"]) for name, fact in said.pop("files").items()}
        return Manifest(folder, step, said, figures, files)
    except OSError as error:
        raise CorruptCheckpoint(f"{where}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON that is no manifest
        raise CorruptCheckpoint(f"{where}: {_reason(error)}") from None


def check_sizes(manifest: Manifest) -> None:
    """Every file is there with its size, and no others with tensors, which torch would read with them."""
    folder = manifest.path
    for name, fact in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CorruptCheckpoint(f"{folder / name}: {error.strerror}") from None
        if size != fact.size:
            raise CorruptCheckpoint(f"{folder / name}: {size} bytes instead of {fact.size}")
    extra = {path.name for path in folder.glob(f"*{TENSORS}")} - manifest.files.keys()
    if extra:
        raise CorruptCheckpoint(f"{folder / min(extra)}: not in the manifest")


def check_hashes(manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files whole and compare their SHA-256."""
    for name in names:
        if sha256_of(manifest.path / name) != manifest.files[name].sha256:
            raise CorruptCheckpoint(f"{manifest.path / name}: SHA-256 differs, the file was changed after it was saved")


def read_state(manifest: Manifest) -> dict[str, Any]:
    """state.json of a checkpoint."""
    where = manifest.path / STATE
    try:
        return decode(where.read_bytes())
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: {_reason(error)}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)[:300]
