"""What stands in a checkpoint folder and how it is verified, before a single byte of a tensor is used.

Nothing here runs code that a file names: JSON and safetensors only, no pickle.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
FORMAT = 1  # of manifest.json


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says: it is written last, so a folder that has one was written to the end."""

    path: Path
    step: int
    facts: dict[str, Any]  # world_size, strategy, …
    figures: dict[str, float]  # of the last evaluation of these weights; empty where there was none
    files: dict[str, dict[str, Any]]  # name → its size in bytes, its sha256


@dataclass(frozen=True)
class Found(Manifest):
    """A checkpoint that was looked into; whether its bytes were verified, says who found it."""

    state: dict[str, Any]  # progress, configuration, …
    tensors: dict[str, Tensor]  # on meta: shapes and types of the whole ones, wherever their shards lie


def encode(value: Any) -> bytes:
    """Data as JSON that people can read, always the same for the same data."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def manifest_bytes(manifest: Manifest) -> bytes:
    """manifest.json, with a SHA-256 over itself: a flipped bit in a figure must show too."""
    said = {
        "format": FORMAT,
        "step": manifest.step,
        **manifest.facts,
        "figures": manifest.figures,
        "files": dict(sorted(manifest.files.items())),
    }
    return encode({**said, "sha256": hashlib.sha256(encode(said)).hexdigest()})


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json alone, which is cheap. CorruptCheckpoint where it is missing or not as it was written."""
    where = folder / MANIFEST
    try:
        data = where.read_bytes()
        said = json.loads(data)
        if said.pop("format") != FORMAT:
            raise ValueError(f"a format other than {FORMAT}, which this version reads")
        step, figures, files = said.pop("step"), said.pop("figures"), said.pop("files")
        del said["sha256"]
        manifest = Manifest(folder, step, said, figures, files)
        # written once more it is the same bytes: its SHA-256 is right, and nothing changed that JSON would not notice
        if manifest_bytes(manifest) != data:
            raise ValueError("not as it was written")
    except OSError as error:
        raise CorruptCheckpoint(f"{where}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON that is no manifest
        raise CorruptCheckpoint(f"{where}: {type(error).__name__}: {str(error)[:300]}") from None
    return manifest


def check_sizes(manifest: Manifest) -> None:
    """Every file is there with its size, and no others with tensors, which torch would read with them."""
    folder = manifest.path
    for name, fact in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CorruptCheckpoint(f"{folder / name}: {error.strerror}") from None
        if size != fact["size"]:
            raise CorruptCheckpoint(f"{folder / name}: {size} bytes instead of {fact['size']}")
    extra = {path.name for path in folder.glob(f"*{TENSORS}")} - manifest.files.keys()
    if extra:
        raise CorruptCheckpoint(f"{folder / min(extra)}: not in the manifest")


def check_hashes(manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files whole and compare their SHA-256."""
    for name in names:
        if sha256_of(manifest.path / name) != manifest.files[name]["sha256"]:
            raise CorruptCheckpoint(f"{manifest.path / name}: SHA-256 differs, the file was changed after it was saved")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
