"""Files of predictions, written piece by piece: whatever the number of samples, memory holds one piece."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.typing import NDArray

from trainer.launch.safe_files import fsync_path, make_folder, open_file
from trainer.messages import BadData

Rows = Mapping[str, NDArray[Any]]  # named rows (n, …) of neighbouring samples

# numpy's names of types, and those of the format
_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}


@contextmanager
def open_drafts(*paths: Path) -> Iterator[list[IO[bytes]]]:
    """Open files that get their names together, at the end; one that is empty gets none.

    Nothing is left of them where something fails inside.
    """
    places = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    make_folder(paths[0].parent)
    for place in places:
        place.unlink(missing_ok=True)
    # exclusive: a link that somebody put there meanwhile is not followed
    files: list[IO[bytes]] = [open_file(place, "xb") for place in places]
    try:
        yield files
        # bytes first, then names: a crash leaves all files or none
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        for place, path in zip(places, paths, strict=True):
            # an empty table, such as that of a network without classes, is no file
            if place.stat().st_size:
                os.replace(place, path)
        fsync_path(paths[0].parent)
    finally:
        for file, place in zip(files, places, strict=True):
            file.close()
            place.unlink(missing_ok=True)


class SafetensorsWriter:
    """A safetensors file of so many samples: `index` (N,), and the named rows, each (N, …)."""

    def __init__(self, file: IO[bytes], samples: int) -> None:
        self._file, self._samples = file, samples
        self._starts: dict[str, int] = {}  # of each tensor, in the file
        self.rows: dict[str, tuple[str, tuple[int, ...]]] = {}  # of each: its type, and the shape of a sample's row

    def add(self, first: int, piece: Rows) -> None:
        """The rows of the samples from this one on. BadData where they are not like those before."""
        # of all tensors the first dimension counts the samples
        count = len(next(iter(piece.values())))
        piece = {"index": numpy.arange(first, first + count, dtype=numpy.int64), **piece}
        rows = {name: (str(values.dtype), values.shape[1:]) for name, values in piece.items()}
        if not self._starts:
            self.rows = rows
            self._begin()
        for name in rows | self.rows:
            if rows.get(name) != self.rows.get(name):
                before, now = _format_row(self.rows.get(name)), _format_row(rows.get(name))
                raise BadData(
                    f"Task.predict gave {name} as {before} for the first samples and as {now} for sample {first}:"
                    " in one file they must be alike. Give a fixed shape"
                )
        for name, values in piece.items():
            # each tensor has its own region (N, …) of the file, so that pieces need not be held
            self._file.seek(self._starts[name] + first * values[:1].nbytes)
            self._file.write(numpy.ascontiguousarray(values).data)

    def _begin(self) -> None:
        """Write the header: how large all will be follows from the first rows."""
        # the widest first: so each begins at a multiple of its own width
        names = sorted(self.rows, key=lambda name: -numpy.dtype(self.rows[name][0]).itemsize)
        header: dict[str, Any] = {}
        at = 0
        for name in names:
            kind, shape = self.rows[name]
            end = at + self._samples * math.prod(shape) * numpy.dtype(kind).itemsize
            header[name] = {"dtype": _TYPES[kind], "shape": [self._samples, *shape], "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        # the header ends at a multiple of 8 bytes, as the format asks
        text = text.ljust(-(-len(text) // 8) * 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in names}
        self._file.truncate(8 + len(text) + at)


def _format_row(row: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{row[0]} {row[1]}" if row else "nothing"


class CSVWriter:
    """A CSV file, row by row; without a row it is empty."""

    def __init__(self, file: IO[bytes], head: Sequence[str]) -> None:
        self._write = csv.writer(_EncodedFile(file.write), lineterminator="\n").writerow
        self._head: Sequence[str] = head

    def add(self, row: Sequence[Any]) -> None:
        """One more row."""
        if self._head:
            self._write(self._head)
            self._head = ()
        self._write(row)


def write_json_line(file: IO[bytes], row: Mapping[str, Any]) -> None:
    """One more line of JSON. A byte of a name that is no text becomes an escape, which JSON knows."""
    file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


class _EncodedFile:
    """What csv writes to: text goes on as bytes; of a name's bytes that are no text the escapes."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write

    def write(self, text: str) -> None:
        """Text of a row."""
        self._write(text.encode(errors="backslashreplace"))
