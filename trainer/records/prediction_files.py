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

from trainer.launch.safe_files import fsync_path, make_folder, open_file, replace_file
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
    """A safetensors file of so many samples: `index` (N,), and the named rows, each (N, …).

    Where rows differ in shape, the file stays empty, and each sample has one of its own in a folder (its number).
    """

    def __init__(self, file: IO[bytes], samples: int, folder: Path) -> None:
        self._file, self._samples, self._folder = file, samples, folder
        self._starts: dict[str, int] = {}  # of each tensor, in the file
        self.rows: dict[str, tuple[str, tuple[int, ...]]] = {}  # of each: its type, and the shape of a sample's row
        self.is_apart = False  # has each sample a file of its own?

    def add(self, first: int, piece: Rows) -> None:
        """The rows of the samples from this one on. BadData where they are others than before."""
        # of all tensors the first dimension counts the samples
        count = len(next(iter(piece.values())))
        piece = {"index": numpy.arange(first, first + count, dtype=numpy.int64), **piece}
        rows = {name: (str(values[0].dtype), values[0].shape) for name, values in piece.items()}
        self.rows = self.rows or rows
        kinds, before = ({name: kind for name, (kind, _) in each.items()} for each in (rows, self.rows))
        if kinds != before:
            raise BadData(f"Task.predict gave {before} for the first samples, and {kinds} for sample {first}")
        differs = rows != self.rows or any(values.dtype == object for values in piece.values())
        if differs and not self.is_apart:
            self._take_apart(first)
        if self.is_apart:
            self._write_apart(first, piece)
            return
        if not self._starts:
            self._begin()
        for name, values in piece.items():
            # each tensor has its own region (N, …) of the file, so that pieces need not be held
            self._file.seek(self._starts[name] + first * values[:1].nbytes)
            self._file.write(numpy.ascontiguousarray(values).data)

    def _take_apart(self, first: int) -> None:
        """From now on each sample has a file; those before this one, which are alike, get theirs, too."""
        self.is_apart = True
        make_folder(self._folder)
        self._file.flush()
        for at in range(first):
            sample = {}
            for name, (kind, shape) in self.rows.items():
                size = math.prod(shape)
                place = self._starts[name] + at * size * numpy.dtype(kind).itemsize
                sample[name] = numpy.fromfile(self._file.name, kind, size, offset=place).reshape(1, *shape)
            self._write_apart(at, sample)
        self._file.truncate(0)  # an empty one gets no name

    def _write_apart(self, first: int, piece: Rows) -> None:
        from safetensors.numpy import save  # here: seldom needed

        for at, values in enumerate(zip(*piece.values(), strict=True), first):
            sample = {name: numpy.ascontiguousarray(value) for name, value in zip(piece, values, strict=True)}
            replace_file(self._folder / f"{at:08}.safetensors", save(sample), lasting=False)

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
