"""Weights as files for other programs: safetensors, a tensor at a time; of large ones several files with an index.

Nothing but the tensor that is being written need be in memory. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9  # of one file, as people expect who download them; a larger tensor has a file of its own
_TYPES = {  # the names that safetensors has for types
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_weight_files(folder: Path, name: str, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write `name`.safetensors; or, above 5 GB, `name`-00001-of-00003.safetensors … and an index.

    shapes: tensors of these shapes and types, perhaps on meta, in the order in which they are written. read: the values
    of one.
    """
    parts = _divide(shapes, MAX_FILE_BYTES)
    files = [
        f"{name}.safetensors" if len(parts) == 1 else f"{name}-{number:05}-of-{len(parts):05}.safetensors"
        for number in range(1, len(parts) + 1)
    ]
    for file, part in zip(files, parts, strict=True):
        _write_file(folder / file, {key: shapes[key] for key in part}, read)
    # of one file nobody needs an index
    if len(parts) == 1:
        return
    # which file each tensor lies in, as transformers looks for it
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in shapes.values())},
        "weight_map": {key: file for file, part in zip(files, parts, strict=True) for key in part},
    }
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divide(shapes: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The names of each file, in order: as many as fit."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in shapes.items():
        # a tensor is never divided: one that is larger than a file has a file of its own
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _write_file(path: Path, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """One file: the length of the header, the header with the place of each tensor, the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # where each tensor's bytes begin and end, behind the header
    for name, tensor in shapes.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in shapes.items():
            value = read(name).contiguous()
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), name
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)  # the tensor's own memory, without a copy
