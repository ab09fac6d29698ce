"""Tokens in files, for texts far larger than memory: how they lie there, written once and read by place."""

from __future__ import annotations

import json
import os
import weakref
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from trainer.messages import Refusal

INDEX = "tokens.json"  # written last: a folder that has it is whole
_OPEN = 256  # files of a split, at most: a set may have more than a process may open


class Writer:
    """Writes the documents of one split: tokens one behind the other in shards, and where each document begins."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard: int) -> None:
        self._folder, self._split, self._full = folder, split, shard  # tokens of a file that takes no more documents
        self._type = numpy.dtype(numpy.uint16 if vocab_size <= 2**16 else numpy.uint32)
        self._file: Any = None
        self._sizes: list[int] = []  # tokens of each shard
        self._starts = array("q")  # of documents, in tokens of the split
        self._tokens = 0  # of the split, so far
        self.bytes = 0  # of the text

    def begin(self) -> None:
        """A document begins; where the present file is full, in the next one."""
        if self._file is None or self._sizes[-1] >= self._full:
            self.close()
            self._file = (self._folder / self._name(len(self._sizes))).open("wb")
            self._sizes.append(0)
        self._starts.append(self._tokens)

    def add(self, tokens: ArrayLike, size: int) -> None:
        """Append a piece of the document: its tokens, and how many bytes of text they are."""
        own = numpy.asarray(tokens, self._type)
        own.tofile(self._file)
        self._sizes[-1] += len(own)
        self._tokens += len(own)
        self.bytes += size

    def close(self) -> None:
        """End the present file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def described(self) -> dict[str, Any]:
        """What the index says of this split; the documents' beginnings go into a file of their own."""
        self.close()
        starts = f"{self._split}-documents.npy"
        numpy.save(self._folder / starts, numpy.array(self._starts, numpy.int64))
        files = [{"file": self._name(number), "tokens": size} for number, size in enumerate(self._sizes)]
        kind = self._type.name
        return {"shards": files, "documents": starts, "type": kind, "tokens": self._tokens, "bytes": self.bytes}

    def _name(self, number: int) -> str:
        return f"{self._split}-{number:05}.bin"


class Shards:
    """The tokens of one split, read by place: nothing of them stays in memory.

    Not mapped: pages that were read would count as memory of the process, until it seems to hold the whole set.
    """

    def __init__(self, folder: Path, split: dict[str, Any]) -> None:
        self.tokens, self.bytes = int(split["tokens"]), int(split["bytes"])
        sizes = [int(one["tokens"]) for one in split["shards"]]
        self.ends: NDArray[numpy.int64] = numpy.cumsum(sizes, dtype=numpy.int64)  # (shards,) in tokens of the split
        self._type = numpy.dtype(split["type"])
        paths = [_whole(folder / one["file"], int(one["tokens"]), self._type.itemsize) for one in split["shards"]]
        self._file = lru_cache(_OPEN)(lambda shard: _File(paths[shard]))
        self.starts: NDArray[numpy.int64] = numpy.load(folder / split["documents"], mmap_mode="r")

    def read(self, start: int, count: int) -> NDArray[Any]:
        """So many tokens from a place on; they must lie in one shard."""
        shard = int(numpy.searchsorted(self.ends, start, side="right"))
        first = start - (int(self.ends[shard - 1]) if shard else 0)
        width = self._type.itemsize
        return numpy.frombuffer(self._file(shard).read(first * width, count * width), self._type)


class _File:
    """An open file, closed when nobody needs it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> bytes:
        """So many bytes from a place on; any thread may, and a forked process."""
        return os.pread(self._descriptor, count, start)


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Shards]]:
    """The index of a folder, and its splits by name. Refusal where the folder is not whole."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return index, {name: Shards(folder, split) for name, split in index["splits"].items()}
    except OSError as error:
        raise Refusal(
            f"data.folder={folder}: {error.strerror or error}; scripts/prepare_tokens makes such a folder"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"data.folder={folder}: {INDEX} is damaged ({type(error).__name__}: {error})") from error


def _whole(path: Path, tokens: int, width: int) -> Path:
    """A file with tokens of this width in bytes; ValueError where it is shorter or longer than the index says."""
    if path.stat().st_size != tokens * width:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, not {tokens:,} × {width}")
    return path
