"""What tensors safetensors files hold, from their headers alone; safetensors itself compares those with the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.records.manifest import CorruptCheckpoint

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorFact:
    """Shape and type of one whole tensor, wherever its shards lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Shard:
    """What one file holds of a tensor, from `offsets` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def read_tensors(files: Iterable[Path]) -> dict[str, TensorFact]:
    """What tensors the files make up together. CorruptCheckpoint where shards are missing or do not fit."""
    shards: dict[str, list[Shard]] = {}
    for file in files:
        try:
            for name, shard in _shards(file).items():
                shards.setdefault(name, []).append(shard)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{file}: {str(error)[:300]}") from None
    return {name: _joined(name, own) for name, own in shards.items()}


def _shards(file: Path) -> dict[str, Shard]:
    """What one file holds, by the tensors' names; no tensor is read."""
    with safe_open(file, "pt") as opened:
        said = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))  # torch's; none of a tensor: whole
        found = {}
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            entry = opened.get_slice(name)
            shape = tuple(entry.get_shape())
            offsets = tuple(said[name]["saved_offsets"]) if name in said else (0,) * len(shape)
            found[name] = Shard(DTYPES[entry.get_dtype()], shape, offsets)
        return found


def _joined(name: str, shards: list[Shard]) -> TensorFact:
    ends = zip(*([at + size for at, size in zip(s.offsets, s.shape, strict=True)] for s in shards), strict=True)
    fact = TensorFact(tuple(map(max, ends)), shards[0].dtype)
    held = sum(math.prod(shard.shape) for shard in shards)
    if any(shard.dtype != fact.dtype for shard in shards) or held != math.prod(fact.shape):
        raise CorruptCheckpoint(f"{name}: {held} of its {math.prod(fact.shape)} elements are there")
    return fact
