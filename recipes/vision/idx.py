"""The idx format of the MNIST family: arrays of bytes behind a header of big-endian sizes."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from recipes.gzipped import unpacked
from trainer.messages import Refusal

_UNSIGNED_BYTE = 8


def read_idx(path: Path, *sizes: int) -> Tensor:
    """The uint8 array in a gzipped idx file, its first dimension free, the others as given."""
    magic = _UNSIGNED_BYTE << 8 | len(sizes) + 1
    shape = " × ".join(["N", *map(str, sizes)])
    expected = f"expected a gzipped idx file of bytes, {shape} (magic number 0x{magic:08x})"
    try:
        content = unpacked(path)
    except FileNotFoundError as error:
        raise Refusal(f"{path} is missing; {expected}") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(f"{path} is damaged or cut short ({error}); {expected}") from error
    header = 4 * (len(sizes) + 2)
    if content[:4] != magic.to_bytes(4, "big"):
        raise Refusal(f"{path} begins with 0x{content[:4].hex()}; {expected}")
    if len(content) < header:
        raise Refusal(f"{path} ends within its header; {expected}")
    count, *rest = struct.unpack(f">{len(sizes) + 1}I", content[4:header])
    if tuple(rest) != sizes:
        raise Refusal(f"{path} holds {' × '.join(map(str, [count, *rest]))} values; {expected}")
    body, needed = len(content) - header, count * math.prod(sizes)
    if body != needed:
        raise Refusal(f"{path} holds {body} bytes behind its header, which announces {needed}; {expected}")
    if not count:
        return torch.empty(0, *sizes, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(count, *sizes)
