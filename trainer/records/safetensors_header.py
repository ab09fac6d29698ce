"""The header of a safetensors file, checked against the file's size before anybody allocates what it claims."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.records.manifest import CorruptCheckpoint, decode

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit

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
    """Shape and type of one whole tensor, wherever its pieces lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one file holds, from `offsets` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def read_tensors(files: Iterable[Path]) -> dict[str, TensorFact]:
    """What tensors the files make up together. CorruptCheckpoint where pieces are missing or do not fit."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for piece in read_header(file):
            pieces.setdefault(piece.name, []).append(piece)
    return {name: _joined(name, parts) for name, parts in pieces.items()}


def read_header(file: Path) -> list[Piece]:
    """The pieces that one file holds; every claim of the header is held against the size of the file."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = decode(stream.read(length))
        return _pieces(header, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file}: {str(error)[:300]}") from None


def _pieces(header: dict[str, Any], room: int) -> list[Piece]:
    """The entries of a header whose data are `room` bytes: they must fill them one after the other."""
    offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    position, found = 0, []
    for name, said in sorted(header.items(), key=lambda item: _span(item[1])):
        dtype, shape, (start, end) = DTYPES[said["dtype"]], _sizes(said["shape"]), _span(said)
        if start != position or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {said['dtype']} {list(shape)} does not lie in bytes {start} to {end}")
        where = _sizes(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(shape)
        if len(where) != len(shape):
            raise ValueError(f"{name}: offsets {list(where)} of a tensor of shape {list(shape)}")
        found.append(Piece(name, dtype, shape, where))
        position = end
    if position != room:
        raise ValueError(f"{room} bytes of data, the header accounts for {position}")
    return found


def _joined(name: str, parts: list[Piece]) -> TensorFact:
    shape = tuple(max(offset + size for offset, size in pair) for pair in zip(*map(_extents, parts), strict=True))
    fact = TensorFact(shape, parts[0].dtype)
    held = sum(math.prod(part.shape) for part in parts)
    full = [part for part in parts if math.prod(part.shape)]
    if any(part.dtype != fact.dtype for part in parts) or len({part.offsets for part in full}) < len(full):
        raise CorruptCheckpoint(f"{name}: its pieces do not belong together")
    if held != math.prod(shape):
        raise CorruptCheckpoint(f"{name}: {held} of its {math.prod(shape)} elements are there")
    return fact


def _extents(part: Piece) -> list[tuple[int, int]]:
    return list(zip(part.offsets, part.shape, strict=True))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


def _span(said: dict[str, Any]) -> tuple[int, int]:
    start, end = _sizes(said["data_offsets"])
    return start, end
