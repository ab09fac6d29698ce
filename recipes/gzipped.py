"""Gzipped files, unpacked in memory: not more than real data has, for a file of a megabyte can hold a gigabyte."""

from __future__ import annotations

import gzip
from pathlib import Path

_ALWAYS = 2**26  # bytes that any file may hold
_TIMES = 100  # larger than it is: text and pixels become 2 to 20 times smaller; gzip can reach 1,000
_PIECE = 2**20  # bytes


def unpacked(path: Path) -> bytearray:
    """What the file holds. OSError, EOFError or zlib.error where it is damaged, ValueError where it holds too much."""
    most, content = max(_ALWAYS, _TIMES * path.stat().st_size), bytearray()
    with gzip.open(path) as file:
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > most:
                raise ValueError(f"more than {most:,} bytes come out of it, as of a file that is made to fill a memory")
    return content
