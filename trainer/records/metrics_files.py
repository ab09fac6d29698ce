"""metrics.jsonl: the metrics of a run, whatever other sinks it has; and the same as a table, metrics.csv."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.launch.safe_files import disk_full_error, make_folder, open_descriptor, open_file, replace_file
from trainer.messages import format_count
from trainer.records.metrics_reader import parse_line, read_lines, read_lines_backwards
from trainer.records.sinks import Line, Sink, WriteDeferred

_MAX_WAITING = 50_000  # lines that wait for room on the disk; some 20 MB


class MetricsFile(Sink):
    """metrics.jsonl: a JSON object a line; no step stands there twice, and a kill tears the last line at most.

    Lines for which the disk has no room wait in memory, in their order.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Take back what an earlier attempt logged after this step."""
        self._path, self._start = folder / "metrics.jsonl", step
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._wanted: dict[str, int] = {}  # how far the file is to be cut back, where that failed
        self._dropped = 0
        make_folder(folder)
        open_file(self._path, "ab").close()
        self._cut({"train": step, "eval": step})

    def train(self, line: Line) -> None:
        """Append the figures of a training step."""
        # at once, so that a kill loses nothing
        self._append("train", line)

    def eval(self, line: Line) -> None:
        """Append the figures of an evaluation."""
        # one that a resumed run makes up for: an attempt that was killed before its save may have written it already
        if line["step"] == self._start:
            self._wanted = {"train": self._start, "eval": self._start - 1}
        self._append("eval", line)

    def rewind(self, step: int) -> None:
        """Take back the lines of steps after this one, also those that wait."""
        last = {"train": step, "eval": step}
        # lines still in memory are lines of the file to come
        self._waiting = deque((line for line in self._waiting if _is_kept(parse_line(line), last)), maxlen=_MAX_WAITING)
        self._wanted = {kind: min(step, self._wanted.get(kind, step)) for kind in last}
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait; Waiting where there is no room."""
        try:
            if self._wanted:
                self._cut(self._wanted)
                self._wanted = {}
            self._write()
        except OSError as error:
            # half a line would be glued to the next one; where this fails, too, the next try begins with it
            with contextlib.suppress(OSError), open_file(self._path, "r+b", buffering=0) as file:
                file.truncate(self._size)
            waiting = format_count(len(self._waiting), "line")
            raise WriteDeferred(f"{self._path}: {error.strerror or error}; waiting for room: {waiting}") from error

    def close(self) -> None:
        """Write what waits; OSError that says how many lines found no room to the end."""
        with contextlib.suppress(OSError):
            self.flush()
        # nobody comes after this that could write them
        if lost := len(self._waiting) + self._dropped:
            raise OSError(f"{self._path}: {format_count(lost, 'line')} found no room on the disk")

    def _append(self, kind: str, line: Line) -> None:
        """Numbers that are none stand there as Python writes them: NaN, Infinity."""
        ordered = {"kind": kind, **{key: line[key] for key in ("step", "epoch") if key in line}, **line}
        self._dropped += len(self._waiting) == _MAX_WAITING  # the oldest goes
        self._waiting.append(json.dumps(ordered).encode() + b"\n")
        self.flush()

    def _write(self) -> None:
        """Append the lines that wait, each in one call: other programs read this file while it grows."""
        if not self._waiting:
            return
        with open_file(self._path, "ab", buffering=0) as file:
            # what is behind the last whole line is half a line, or what a file server took and lost
            if file.tell() != self._size:
                file.truncate(self._size)
            while self._waiting:
                line = self._waiting[0]
                if file.write(line) < len(line):
                    raise disk_full_error(self._path)
                self._size += len(line)
                self._waiting.popleft()

    def _cut(self, last: Mapping[str, int]) -> None:
        """Keep the lines up to the last step of their kind. Only what goes is read, and the line before it."""
        with open_file(self._path, "r+b", buffering=0) as file:
            size, following = file.seek(0, os.SEEK_END), b""
            self._size, kept_lines = size, b""
            for offset, line in read_lines_backwards(self._path):
                fields = parse_line(line)
                if not _is_kept(fields, last):
                    self._size, kept_lines = offset, following
                elif fields is not None and fields["step"] <= min(last.values()):
                    break  # lines stand in the order of their steps
                else:
                    following = line + following
            if self._size < size:
                # nothing is written anew: a kill in between leaves whole lines
                file.truncate(self._size)
                file.seek(self._size)
                self._size += file.write(kept_lines)
                os.fsync(file.fileno())


def _is_kept(fields: Mapping[str, Any] | None, last_steps: Mapping[str, int]) -> bool:
    """Is this a line up to the last step of its kind? What a crash tore is no line."""
    if fields is None or not isinstance(fields.get("step"), int):
        return False
    return fields["step"] <= last_steps.get(str(fields.get("kind")), -1)


class CSV(Sink):
    """A row for each line of metrics.jsonl, a column for each of its keys.

    It is made of that file, which knows best which lines count; so `Figures` stands before it in a `Log`.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Begin with what metrics.jsonl has kept of earlier starts."""
        self._source, self._path, self._start = folder / "metrics.jsonl", folder / "metrics.csv", step
        self._behind = False  # are there rows for which the disk had no room?
        # a column stays where programs have found it, also after a resume
        self._columns = dict.fromkeys(("kind", "step", "epoch")) | _read_columns(self._path)
        self._catch_up()

    def train(self, line: Line) -> None:
        """Add the figures of a training step."""
        self._add({"kind": "train", **line})

    def eval(self, line: Line) -> None:
        """Add the figures of an evaluation."""
        self._add({"kind": "eval", **line})

    def rewind(self, step: int) -> None:
        """The next row brings the table in line."""
        self._behind = True

    def close(self) -> None:
        """Add the rows for which the disk had no room."""
        if self._behind:
            self._catch_up()

    def _add(self, row: Line) -> None:
        # a figure that is new needs a column in all rows; an evaluation that is made up for may have a row already
        made_up_for = row["kind"] == "eval" and row["step"] == self._start
        anew = self._behind or made_up_for or not row.keys() <= self._columns.keys()
        self._behind = True  # until this row stands there
        try:
            if anew:
                last = self._catch_up()
                self._behind = last != _row_order(row)  # it waits there, too
            else:
                self._append([row])
                self._behind = False
        except OSError as error:
            raise WriteDeferred(
                f"{self._path}: {error.strerror or error}; made anew as soon as there is room"
            ) from error
        if self._behind:
            raise WriteDeferred(f"{self._path}: {self._source.name} waits for room, and this with it")

    def _append(self, rows: Iterable[Line]) -> None:
        with open_file(self._path, "ab", buffering=0) as file:
            for data in _format_rows(self._columns, rows):
                if file.write(data) < len(data):  # a row in one call: other programs read this file while it grows
                    raise disk_full_error(self._path)

    def _catch_up(self) -> tuple[int, bool] | None:
        """Make the table that of its source; the place of the last row. Where only ends differ, only those are read."""
        # this start has cut that file already: what is there counts, up to where it is being written
        common = self._common() if list(_read_columns(self._path)) == list(self._columns) else None
        if common and all(line.keys() <= self._columns.keys() for line in read_lines(self._source, common[1])):
            with open_file(self._path, "r+b", buffering=0) as file:
                file.truncate(common[0])
            self._append(read_lines(self._source, common[1]))
        else:
            for line in read_lines(self._source):
                self._columns |= dict.fromkeys(line)
            header = dict(zip(self._columns, self._columns, strict=True))
            replace_file(self._path, _format_rows(self._columns, chain([header], read_lines(self._source))))
        return next(
            (_row_order(fields) for _, line in read_lines_backwards(self._source) if (fields := parse_line(line))), None
        )

    def _common(self) -> tuple[int, int] | None:
        """The bytes at which the last row ends, in table and source, that both have; None: there is none."""
        rows, lines = self._rows_back(), self._lines_back()
        row, line = next(rows, None), next(lines, None)
        # both stand in the order of their places, so whichever has the later one at its end goes one back
        while row is not None and line is not None:
            if row == line:
                return row.end, line.end
            ours, theirs = row.place, line.place
            row, line = next(rows, None) if ours >= theirs else row, next(lines, None) if ours <= theirs else line
        return None

    def _rows_back(self) -> Iterator[_Row]:
        """The table's rows, the last first; the header is none, nor what a full disk has left of one."""
        for start, row in read_lines_backwards(self._path):
            with suppress(ValueError, csv.Error):
                # half a row, which a full disk has left, has too few cells
                (cells,) = csv.reader([row.decode()])
                fields = dict(zip(self._columns, cells, strict=True))
                yield _Row(_row_order({**fields, "step": int(fields["step"])}), row, start + len(row))

    def _lines_back(self) -> Iterator[_Row]:
        """The source's lines as rows, the last first."""
        for start, line in read_lines_backwards(self._source):
            fields = parse_line(line)
            if fields is not None:
                # as bytes, since these are compared with what stands in the table
                (row,) = _format_rows(self._columns, [fields])
                yield _Row(_row_order(fields), row, start + len(line))


@dataclass(frozen=True)
class _Row:
    """A row, in the table or as it should be there."""

    place: tuple[int, bool]
    data: bytes
    end: int = field(compare=False)


def _row_order(line: Mapping[str, Any]) -> tuple[int, bool]:
    """What rows are ordered by: a step, then its evaluation."""
    return line["step"], line["kind"] == "eval"


def _read_columns(path: Path) -> dict[str, None]:
    """The names of the columns that are there, in their order."""
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8", opener=open_descriptor) as file:
        return dict.fromkeys(next(csv.reader(file), []))


def _format_rows(columns: Mapping[str, None], lines: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Lines as rows; what a line does not say stays empty, and what has no column is left out."""
    text, names = StringIO(), list(columns)
    writer = csv.writer(text, lineterminator="\n")
    for line in lines:
        writer.writerow([line.get(name, "") for name in names])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
