"""Tensors of a checkpoint in safetensors files: written, and read back by any other number of ranks.

Each header is read by one rank, for all. Headers travel as plain values: of torch's own objects a hundred thousand take
longer to unpack than the files to open.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Size, Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.parallel.optimizer_state import OTHER_PREFIXES
from trainer.records.checkpoint.base_weights import base_of
from trainer.records.checkpoint.manifest import (
    TENSOR_SUFFIX,
    CheckpointInfo,
    CorruptCheckpoint,
    Headers,
    TensorShard,
)
from trainer.records.checkpoint.save_plan import SavePlan
from trainer.records.disk import Disk

SHARDING_KEY = "DCP_SHARDING_INFO"  # under which torch looks in a header for where its shards begin


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], plan: SavePlan, rank: int, disk: Disk) -> None:
    """Write a rank's share of the tensors into a folder: the network, and all else, in a file of its own each.

    So any program that reads safetensors can load the network.
    """
    for number in (1, 2):
        names = [name for name in tensors if (2 if name.startswith(OTHER_PREFIXES) else 1) == number]
        if names:
            # shard-00003-model-00001-of-00002: rank 2, the network; 00002 has optimizer and all else
            shard, last = f"{rank + 1:05}", 2 if plan.has_other_state else 1
            path = folder / f"shard-{shard}-model-{number:05}-of-{last:05}{TENSOR_SUFFIX}"
            # what torch's reader needs to put shards together again
            shards = {name: {"saved_offsets": plan.offsets[name]} for name in names}
            metadata = {SHARDING_KEY: json.dumps(shards), "DCP_VERSION": "1.0", "format": "pt"}
            # not torch's writer: it puts the file together in memory first, and for as long no other thread can work
            write_safetensors(path, {name: tensors[name] for name in names}, metadata, disk)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, disk: Disk | None = None
) -> None:
    """Write one file from the tensors' own memory; `metadata`: texts for its header."""
    path.touch()
    mode = path.stat().st_mode
    (disk or Disk()).write_tensors(path, _contiguous(tensors), metadata)
    path.chmod(mode)  # safetensors 0.8 puts a file in its place that nobody else can read


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: rows in order (channels_last is not), no two on one memory."""
    seen: set[tuple[torch.device, int]] = set()  # where memory begins that another name has brought already
    rows = {}
    for name, tensor in tensors.items():
        # tied weights have one memory under two names, which safetensors refuses
        address = (tensor.device, tensor.data_ptr())
        shared = tensor.numel() > 0 and address in seen
        seen.add(address)
        rows[name] = (
            tensor.clone(memory_format=torch.contiguous_format) if shared or not tensor.is_contiguous() else tensor
        )
    return rows


def check_finite(folder: Path, names: Iterable[str]) -> None:
    """CorruptCheckpoint where training has left a number in these files that is not finite.

    What is a buffer they do not say, and a buffer may be infinite by design: of the network only NaN counts.
    """
    for file in (name for name in names if name.endswith(TENSOR_SUFFIX)):
        with safe_open(folder / file, "pt") as opened:
            tensor_names = opened.keys()
            for name in tensor_names:  # one tensor at a time: a file may be larger than the memory
                is_network = not name.startswith(OTHER_PREFIXES)
                # what this file holds of the tensor, on the CPU
                x = opened.get_tensor(name)
                if x.is_floating_point() and (x.isnan().any() if is_network else x.ndim and not x.isfinite().all()):
                    raise CorruptCheckpoint(f"{folder / file}: {name} is not finite, training from it would be in vain")


def load_tensors(tensors: dict[str, Tensor], checkpoint: CheckpointInfo) -> None:
    """Fill tensors in place from a verified checkpoint. No communication: each rank reads what it holds.

    Those that the checkpoint does not hold, since they lie elsewhere, are taken out: the network has them already.
    """
    base = base_of(checkpoint.state)
    for name in tensors.keys() & base.shapes.keys() if base else ():
        del tensors[name]
    # torch compares names and shapes before it reads, and takes of each file what this rank's shards overlap
    with _raise_original_errors():
        dcp.load(
            dict(tensors),
            storage_reader=KnownHeadersReader(checkpoint.path, checkpoint.headers, tensors.keys()),
            no_dist=True,
        )


def read_tensor(checkpoint: CheckpointInfo, name: str) -> Tensor:
    """One whole tensor of a verified checkpoint, on the CPU: what each file holds of it, put together."""
    whole = torch.empty_like(checkpoint.tensors[name], device="cpu")
    for file, shards in checkpoint.headers.items():
        if name in shards:
            shard = shards[name]
            place = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.shape, strict=True))
            # opened anew: what a file that stays open has mapped would count as this process's memory
            with safe_open(checkpoint.path / file, "pt") as opened:
                whole[place] = opened.get_tensor(name)
    return whole


@contextmanager
def _raise_original_errors() -> Iterator[None]:
    """An error as it was where it happened: torch hands it to all ranks in a parcel."""
    with torch.no_grad(), warnings.catch_warnings():
        # torch remarks that it works without a process group, which is what was asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as collected:
            raise next(iter(collected.failures.values()))[0] from collected


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, dict[str, TensorShard]]:
    """By file, what it says that it holds, of those of these files that hold tensors; nothing else is read.

    CorruptCheckpoint where a header does not agree with its file.
    """
    try:
        return {file: _read_header(folder / file) for file in files if file.endswith(TENSOR_SUFFIX)}
    except Exception as error:  # whatever a damaged header makes of its readers
        raise CorruptCheckpoint(f"{folder}: {str(error)[:300]}") from None


def _read_header(path: Path) -> dict[str, TensorShard]:
    tensors = {}
    with safe_open(path, "pt") as opened:
        shards = json.loads((opened.metadata() or {}).get(SHARDING_KEY, "null"))
        names = opened.keys()
        for name in names:
            slice = opened.get_slice(name)
            # of the shard in this file, not of the whole tensor
            shape = tuple(slice.get_shape())
            # the type from a tensor of no rows: safetensors' names of types are its own
            dtype = (slice[:0] if shape else opened.get_tensor(name)).dtype
            offset = tuple(map(int, shards[name]["saved_offsets"])) if shards else (0,) * len(shape)
            if len(offset) != len(shape) or min(offset, default=0) < 0:
                raise ValueError(f"{path.name}: {name}: shape {shape} at {offset}")
            tensors[name] = TensorShard(shape, dtype, offset)
    return tensors


def unsharded_tensors(folder: Path, headers: Headers) -> dict[str, Tensor]:
    """What tensors the files make up together, on meta. CorruptCheckpoint where shards are missing."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    counts: dict[str, int] = {}
    for name, shard in _iterate_shards(headers):
        # where this shard ends in the whole tensor, along each dimension
        ends = tuple(first + size for first, size in zip(shard.offset, shard.shape, strict=True))
        known_shape = shapes.get(name, ends)
        if len(known_shape) != len(ends):
            raise CorruptCheckpoint(f"{folder}: {name}: shards of {len(known_shape)} and of {len(ends)} dimensions")
        shapes[name] = tuple(map(max, known_shape, ends))
        dtypes.setdefault(name, shard.dtype)
        counts[name] = counts.get(name, 0) + Size(shard.shape).numel()
    for name, shape in shapes.items():
        # the last end of the shards is the whole tensor's: what lacks in between would be left as it was
        if counts[name] != (count := Size(shape).numel()):
            raise CorruptCheckpoint(f"{folder}: {name}: {counts[name]} of its {count} elements are there")
    return {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}


def _iterate_shards(headers: Headers) -> Iterable[tuple[str, TensorShard]]:
    return (item for shards in headers.values() for item in shards.items())


class _ShardFile(NamedTuple):
    """What torch's reader asks of a shard."""

    relative_path: str
    shape: Size
    dtype: torch.dtype


class KnownHeadersReader(HuggingFaceStorageReader):
    """torch's reader, of these tensors of a folder whose headers are known: it opens only files that it needs."""

    def __init__(self, folder: Path, headers: Headers, names: Collection[str]) -> None:
        super().__init__(str(folder))
        self._folder, self._headers, self._names = folder, headers, names

    def read_metadata(self) -> Metadata:
        """What torch would have read."""
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, _ShardFile] = {}
        sizes = {name: tensor.shape for name, tensor in unsharded_tensors(self._folder, self._wanted()).items()}
        for file, shards in self._wanted().items():
            for name, (shape, dtype, offset) in shards.items():
                entry = TensorStorageMetadata(TensorProperties(dtype=dtype), sizes[name], [])
                tensors.setdefault(name, entry).chunks.append(ChunkStorageMetadata(Size(offset), Size(shape)))
                storage[MetadataIndex(name, Size(offset))] = _ShardFile(str(self._folder / file), Size(shape), dtype)
        return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    def _wanted(self) -> Mapping[str, Mapping[str, TensorShard]]:
        return {
            file: {name: shard for name, shard in shards.items() if name in self._names}
            for file, shards in self._headers.items()
        }
