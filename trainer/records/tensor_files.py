"""Tensors to safetensors files and back, through torch.distributed.checkpoint: whole ones and sharded ones alike."""

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from trainer.parallel.optimizer_state import APART
from trainer.records.manifest import FROZEN, SHARDS, TENSORS, CorruptCheckpoint, Found, KnownHeaders
from trainer.records.writers import Share


def write_tensors(folder: Path, held: Mapping[str, Tensor], share: Share, frozen: Collection[str], rank: int) -> None:
    """Write a rank's share of the tensors into a folder.

    held: what it writes of each; frozen: the names of those that have files of their own, which other checkpoints will
    share.
    """
    for number in (0, 1, 2):
        own = [name for name in held if _file_of(name, frozen) == number]
        if own:
            shard, last = f"{rank + 1:05}", 2 if share.apart else 1
            file = f"shard-{shard}-model-{number:05}-of-{last:05}" if number else f"{FROZEN}{shard}"
            path = folder / f"{file}{TENSORS}"
            # what torch's reader needs to put shards together again
            shards = {name: {"saved_offsets": share.offsets[name]} for name in own}
            told = {SHARDS: json.dumps(shards), "DCP_VERSION": "1.0", "format": "pt"}
            # not torch's writer: it puts the file together in memory first, and for as long no other thread can work
            write_file(path, {name: held[name] for name in own}, told)
            if not number:  # shared with other checkpoints: nobody may change it
                path.chmod(path.stat().st_mode & ~0o222)


def write_file(path: Path, tensors: Mapping[str, Tensor], told: dict[str, str] | None = None) -> None:
    """Write one file from the tensors' own memory; `told`: texts for its header."""
    path.touch()
    mode = path.stat().st_mode
    save_file(_in_rows(tensors), path, told)
    path.chmod(mode)  # safetensors 0.8 puts a file in its place that nobody else can read


def _file_of(name: str, frozen: Collection[str]) -> int:
    """The network has a file of its own, so that any program that reads safetensors can load it."""
    return 2 if name.startswith(APART) else 0 if name in frozen else 1


def _in_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: rows in order (channels_last is not), no two on one memory."""
    given: set[tuple[torch.device, int]] = set()  # where memory begins that another name has brought already
    rows = {}
    for name, one in tensors.items():
        where = (one.device, one.data_ptr())
        shared = one.numel() > 0 and where in given
        given.add(where)
        rows[name] = one.clone(memory_format=torch.contiguous_format) if shared or not one.is_contiguous() else one
    return rows


def check_numbers(folder: Path, names: Iterable[str]) -> None:
    """CorruptCheckpoint where training has left a number in these files that is not finite.

    What is a buffer they do not say, and a buffer may be infinite by design: of the network only NaN counts.
    """
    for file in (name for name in names if name.endswith(TENSORS)):
        with safe_open(folder / file, "pt") as opened:
            held = opened.keys()
            for name in held:  # one tensor at a time: a file may be larger than the memory
                own = not name.startswith(APART)
                x = opened.get_tensor(name)
                if x.is_floating_point() and (x.isnan().any() if own else x.ndim and not x.isfinite().all()):
                    raise CorruptCheckpoint(f"{folder / file}: {name} is not finite, training from it would be in vain")


def read_into(tensors: dict[str, Tensor], found: Found) -> None:
    """Fill tensors in place from a verified checkpoint. No communication: each rank reads what it holds."""
    # torch compares names and shapes before it reads, and takes of each file what this rank's shards overlap
    with _plainly():
        dcp.load(dict(tensors), storage_reader=KnownHeaders(found.path, found.headers, tensors.keys()), no_dist=True)


@contextmanager
def _plainly() -> Iterator[None]:
    """An error as it was where it happened: torch hands it to all ranks in a parcel."""
    with torch.no_grad(), warnings.catch_warnings():
        # torch remarks that it works without a process group, which is what was asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as parcel:
            raise next(iter(parcel.failures.values()))[0] from parcel
