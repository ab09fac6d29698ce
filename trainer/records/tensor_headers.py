"""The headers of a checkpoint's files: which part of which tensor lies where. Each is read by one rank, for all.

They travel as plain values: of torch's own objects a hundred thousand take longer to unpack than the files to open.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Size, Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.records.manifest import SHARDS, TENSORS, CorruptCheckpoint, Headers, Part


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, dict[str, Part]]:
    """By file, what it says that it holds, of those of these files that hold tensors; nothing else is read.

    CorruptCheckpoint where a header does not agree with its file.
    """
    try:
        return {file: _header(folder / file) for file in files if file.endswith(TENSORS)}
    except Exception as error:  # whatever a damaged header makes of its readers
        raise CorruptCheckpoint(f"{folder}: {str(error)[:300]}") from None


def _header(path: Path) -> dict[str, Part]:
    parts = {}
    with safe_open(path, "pt") as opened:
        shards = json.loads((opened.metadata() or {}).get(SHARDS, "null"))
        held = opened.keys()
        for name in held:
            slice = opened.get_slice(name)
            shape = tuple(slice.get_shape())
            # the type from a tensor of no rows: safetensors' names of types are its own
            type = (slice[:0] if shape else opened.get_tensor(name)).dtype
            begin = tuple(map(int, shards[name]["saved_offsets"])) if shards else (0,) * len(shape)
            if len(begin) != len(shape) or min(begin, default=0) < 0:
                raise ValueError(f"{path.name}: {name}: shape {shape} at {begin}")
            parts[name] = Part(shape, type, begin)
    return parts


def whole(folder: Path, headers: Headers) -> dict[str, Tensor]:
    """What tensors the files make up together, on meta. CorruptCheckpoint where shards are missing."""
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, torch.dtype] = {}
    held: dict[str, int] = {}
    for name, part in _parts(headers):
        ends = tuple(first + size for first, size in zip(part.begin, part.shape, strict=True))
        before = shapes.get(name, ends)
        if len(before) != len(ends):
            raise CorruptCheckpoint(f"{folder}: {name}: shards of {len(before)} and of {len(ends)} dimensions")
        shapes[name] = tuple(map(max, before, ends))
        types.setdefault(name, part.type)
        held[name] = held.get(name, 0) + Size(part.shape).numel()
    for name, shape in shapes.items():
        # the last end of the shards is the whole tensor's: what lacks in between would be left as it was
        if held[name] != (count := Size(shape).numel()):
            raise CorruptCheckpoint(f"{folder}: {name}: {held[name]} of its {count} elements are there")
    return {name: torch.empty(shape, dtype=types[name], device="meta") for name, shape in shapes.items()}


def _parts(headers: Headers) -> Iterable[tuple[str, Part]]:
    return (item for held in headers.values() for item in held.items())


class _Place(NamedTuple):
    """What torch's reader asks of a shard."""

    relative_path: str
    shape: Size
    dtype: torch.dtype


class KnownHeaders(HuggingFaceStorageReader):
    """torch's reader, of these tensors of a folder whose headers are known: it opens only files that it needs."""

    def __init__(self, folder: Path, headers: Headers, names: Collection[str]) -> None:
        super().__init__(str(folder))
        self._folder, self._headers, self._names = folder, headers, names

    def read_metadata(self) -> Metadata:
        """What torch would have read."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        sizes = {name: one.shape for name, one in whole(self._folder, self._wanted()).items()}
        for file, held in self._wanted().items():
            for name, (shape, type, begin) in held.items():
                of_none = TensorStorageMetadata(TensorProperties(dtype=type), sizes[name], [])
                tensors.setdefault(name, of_none).chunks.append(ChunkStorageMetadata(Size(begin), Size(shape)))
                places[MetadataIndex(name, Size(begin))] = _Place(str(self._folder / file), Size(shape), type)
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def _wanted(self) -> Mapping[str, Mapping[str, Part]]:
        return {
            file: {name: part for name, part in held.items() if name in self._names}
            for file, held in self._headers.items()
        }
