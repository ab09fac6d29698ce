"""metrics.csv: the lines of metrics.jsonl as a table, for spreadsheets and pandas."""

import csv
import json
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from trainer.launch.durable import full, replace_file
from trainer.records.log import Line, Sink, Waiting


class CSV(Sink):
    """A row for each line of metrics.jsonl, a column for each of its keys.

    It is made of that file, which knows best which lines count; so `Figures` stands before it in a `Log`.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Begin with what metrics.jsonl has kept of earlier starts."""
        self._source, self._path, self._start = folder / "metrics.jsonl", folder / "metrics.csv", step
        self._behind = False  # are there rows for which the disk had no room?
        # a column stays where programs have found it, also after a resume
        self._columns = dict.fromkeys(("kind", "step", "epoch")) | _header(self._path)
        self._write_anew()

    def train(self, line: Line) -> None:
        """Add the figures of a training step."""
        self._add({"kind": "train", **line})

    def eval(self, line: Line) -> None:
        """Add the figures of an evaluation."""
        self._add({"kind": "eval", **line})

    def rewind(self, step: int) -> None:
        """The next row makes the table anew."""
        self._behind = True

    def close(self) -> None:
        """Add the rows for which the disk had no room."""
        if self._behind:
            self._write_anew()

    def _add(self, row: Line) -> None:
        # a figure that is new needs a column in all rows; an evaluation that is made up for may have a row already
        made_up_for = row["kind"] == "eval" and row["step"] == self._start
        anew = self._behind or made_up_for or not row.keys() <= self._columns.keys()
        self._behind = True  # until this row stands there
        try:
            if anew:
                last = self._write_anew()
                self._behind = (last.get("kind"), last.get("step")) != (row["kind"], row["step"])  # it waits there, too
            else:
                self._append(row)
                self._behind = False
        except OSError as error:
            raise Waiting(f"{self._path}: {error.strerror or error}; made anew as soon as there is room") from error
        if self._behind:
            raise Waiting(f"{self._path}: {self._source.name} waits for room, and this with it")

    def _append(self, row: Line) -> None:
        data = _rows(self._columns, [row])
        with self._path.open("ab", buffering=0) as file:
            if file.write(data) < len(data):  # in one call: other programs read this file while it grows
                raise full(self._path)

    def _write_anew(self) -> dict[str, Any]:
        """The whole table, in the place of the one before; the last line of its source."""
        # this start has cut that file already: what is there counts, up to where it is being written
        whole = [line for line in self._source.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        lines = [json.loads(line) for line in whole]
        self._columns |= {name: None for line in lines for name in line}
        header = dict(zip(self._columns, self._columns, strict=True))
        replace_file(self._path, _rows(self._columns, [header, *lines]))
        return lines[-1] if lines else {}


def _header(path: Path) -> dict[str, None]:
    """The names of the columns that are there, in their order."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return dict.fromkeys(next(csv.reader(file), []))


def _rows(columns: Mapping[str, None], lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Lines as rows; what a line does not say stays empty."""
    text = StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
