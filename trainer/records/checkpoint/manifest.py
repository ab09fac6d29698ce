"""What stands in a checkpoint folder and how it is verified: manifest.json and the headers of its files.

Nothing here runs code that a file names: JSON and safetensors only, no pickle.

Each header is read by one rank, for all. Headers travel as plain values: of torch's own objects a hundred thousand take
longer to unpack than the files to open.
"""

import hashlib
import json
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from trainer.launch.safe_files import describe_entry, open_file
from trainer.launch.typed_values import (
    DamagedFile,
    InvalidField,
    Number,
    TensorShape,
    Text,
    Texts,
    Tree,
    Validator,
    Whole,
    convert,
    form,
    mapping_of,
    read_json,
)
from trainer.messages import escape_line

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
TENSOR_SUFFIX = ".safetensors"  # ends the names of files with tensors
FORMAT_VERSION = 1  # of manifest.json
FINITE_FACT = "finite"  # a fact of those whose tensors were found finite before they were saved
RESUME_KEYS = ("progress",)  # what state.json must say for a run to go on from there


Sha256 = Annotated[str, form("[0-9a-f]{64}")]


class FileFields(TypedDict):
    """What a manifest says of a file."""

    size: Whole
    sha256: Sha256


FileName = Annotated[str, form(r"[^/\\\x00-\x1f\x7f-\x9f]{1,255}")]  # in the folder: no name leads out of it


class ManifestFields(TypedDict):
    """manifest.json, as far as it is read."""

    format: Whole
    step: Whole
    figures: Annotated[dict[str, float], mapping_of(Text, Number)]
    files: Annotated[dict[str, FileFields], mapping_of(FileName, FileFields)]
    sha256: Text
    world_size: NotRequired[Whole]
    strategy: NotRequired[Text]
    precision: NotRequired[Text]


class ProgressFields(TypedDict):
    """How far a run is."""

    step: Whole
    epoch: Whole
    position: Whole
    samples: Whole
    owed: NotRequired[Whole | None]
    stale: NotRequired[Whole]
    rollbacks: NotRequired[Whole]  # of older versions, which went back by themselves
    left_out: NotRequired[Whole]


def _check_progress(value: Any) -> dict[str, Any]:
    """Counts that can be true together: each step is of a sample or more, each epoch of a step or more."""
    counts: dict[str, Any] = convert(value, ProgressFields)
    for smaller, larger in (("epoch", "step"), ("step", "samples"), ("position", "samples")):
        # what was passed over moved epoch and position without a step
        if counts[smaller] > counts[larger] + counts.get("left_out", 0) * (smaller != "step"):
            raise InvalidField(smaller, f"is {counts[smaller]:,}, more than progress.{larger}, {counts[larger]:,}")
    return counts


class DataSetFields(TypedDict):
    """Tells one data set from another."""

    samples: Whole
    fingerprint: Text


class DataFields(TypedDict):
    """The data that a run has."""

    training: DataSetFields
    evaluation: DataSetFields
    classes: NotRequired[Texts]


class BaseFields(TypedDict):
    """Frozen weights that lie elsewhere."""

    path: Text
    files: Annotated[dict[str, str], mapping_of(FileName, Sha256)]
    tensors: Annotated[dict[str, list[int]], mapping_of(Text, TensorShape)]


class StateFields(TypedDict):
    """state.json, as far as it is read."""

    progress: NotRequired[Annotated[ProgressFields, Validator(_check_progress)]]
    data: NotRequired[DataFields]
    horizon: NotRequired[Whole]
    precision: NotRequired[Text]
    schedule: NotRequired[Tree]
    configuration: NotRequired[Tree]
    base: NotRequired[BaseFields]


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used; the message names the file and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_line(message))  # names of files and of tensors are in it, which others have chosen


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says: it is written last, so a folder that has one was written to the end."""

    path: Path
    step: int
    facts: dict[str, Any]  # world_size, strategy, …
    metrics: dict[str, float]  # of the last evaluation of these weights; empty where there was none
    files: dict[str, dict[str, Any]]  # name → its size in bytes, its sha256


class TensorShard(NamedTuple):
    """A tensor in a file, or a shard of one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]  # where in the whole tensor


Headers = Mapping[str, Mapping[str, TensorShard]]  # by file, then by tensor


@dataclass(frozen=True)
class CheckpointInfo(Manifest):
    """A checkpoint that was looked into; whether its bytes were verified, says who found it."""

    state: dict[str, Any]  # progress, configuration, …
    tensors: dict[str, Tensor]  # on meta: shapes and types of the whole ones, wherever their shards lie
    headers: Headers  # of all files: where the shards lie


def encode_json(value: Any) -> bytes:
    """Data as JSON that people can read, always the same for the same data."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def encode_manifest(manifest: Manifest) -> bytes:
    """manifest.json, with a SHA-256 over itself: a flipped bit in a figure must show too."""
    fields = {
        "format": FORMAT_VERSION,
        "step": manifest.step,
        **manifest.facts,
        "figures": manifest.metrics,
        "files": dict(sorted(manifest.files.items())),
    }
    return encode_json({**fields, "sha256": hashlib.sha256(encode_json(fields)).hexdigest()})


@contextmanager
def _corrupt_if_unreadable(path: Path) -> Iterator[None]:
    """Inside, a file that is missing, unreadable or damaged is a CorruptCheckpoint."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror}") from None
    except DamagedFile as error:
        raise CorruptCheckpoint(str(error)) from None


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json alone, which is cheap. CorruptCheckpoint where it is missing or not as it was written."""
    path = folder / MANIFEST_FILE
    with _corrupt_if_unreadable(path):
        fields, data = read_json(path, ManifestFields)
        if fields.pop("format") != FORMAT_VERSION:
            raise DamagedFile(f"{path}: a format other than {FORMAT_VERSION}, which this version reads")
        step, metrics, files = fields.pop("step"), fields.pop("figures"), fields.pop("files")
        del fields["sha256"]
        manifest = Manifest(folder, step, fields, metrics, files)
        # written once more it is the same bytes: its SHA-256 is right, and nothing changed that JSON would not notice
        if encode_manifest(manifest) != data:
            raise DamagedFile(f"{path}: not as it was written")
    return manifest


def read_state(manifest: Manifest, required: Collection[str] = ()) -> dict[str, Any]:
    """Read state.json, which must say what is needed. CorruptCheckpoint where it cannot be true."""
    path = manifest.path / STATE_FILE
    with _corrupt_if_unreadable(path):
        state, _ = read_json(path, StateFields)
        for name in sorted(set(required) - state.keys()):
            raise DamagedFile(f"{path}: {name} is missing")
        progress = state.get("progress", {"step": manifest.step, "position": 0})
        if progress["step"] != manifest.step:
            raise DamagedFile(
                f"{path}: progress.step is {progress['step']:,}, the manifest is of step {manifest.step:,}"
            )
        # behind the end of its epoch a run would skip what it has not seen
        if "data" in state and progress["position"] > (most := state["data"]["training"]["samples"]):
            raise DamagedFile(f"{path}: progress.position is {progress['position']:,}, an epoch has {most:,} samples")
    return state


def check_sizes(manifest: Manifest) -> None:
    """Every file is there with its size, and no others with tensors, which torch would read with them."""
    folder = manifest.path
    for name, entry in manifest.files.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise CorruptCheckpoint(f"{folder / name}: {error.strerror}") from None
        # a device, or a pipe, would be read for ever
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{folder / name}: it is {describe_entry(folder / name)}, which no checkpoint has")
        size = status.st_size
        if size != entry["size"]:
            raise CorruptCheckpoint(f"{folder / name}: {size} bytes instead of {entry['size']}")
    extra = {path.name for path in folder.glob(f"*{TENSOR_SUFFIX}")} - manifest.files.keys()
    if extra:
        raise CorruptCheckpoint(f"{folder / min(extra)}: not in the manifest")


def check_hashes(manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files whole and compare their SHA-256."""
    for name in names:
        if file_sha256(manifest.path / name) != manifest.files[name]["sha256"]:
            raise CorruptCheckpoint(f"{manifest.path / name}: SHA-256 differs, the file was changed after it was saved")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with open_file(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
