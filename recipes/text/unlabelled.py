"""New texts without labels: lines of a text file, or rows of a CSV, TSV or JSONL file."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.inputs import listed
from recipes.text.table import SEPARATORS
from trainer.messages import Refusal, did_you_mean

ENDINGS = tuple(f"{ending}{packed}" for ending in (".txt", ".jsonl", *SEPARATORS) for packed in ("", ".gz"))


class New(NamedTuple):
    """One input."""

    name: str  # file:line
    columns: list[str]  # its texts; none where it cannot be read
    error: str  # why not; empty: it can


class Unlabelled(Dataset):
    """Texts in the order of their lines, made numbers a batch at a time, and 0; of what is no text that of "" and 1.

    encode: (the columns of each text) → inputs of a batch.
    """

    def __init__(self, rows: Sequence[New], columns: int, encode: Callable[[list[list[str]]], Any]) -> None:
        self._rows, self._empty, self._encode = rows, [""] * columns, encode

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """The inputs of these texts, and which of them are damaged, (B,)."""
        rows = [self._rows[index] for index in indices.tolist()]
        return self._encode([row.columns or self._empty for row in rows]), torch.tensor(
            [int(bool(r.error)) for r in rows]
        )

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        raise NotImplementedError  # read in batches

    def name(self, index: int) -> str:
        """The file and the line where the text begins."""
        return self._rows[index].name

    def error(self, index: int) -> str:
        """What is wrong with it."""
        return self._rows[index].error


def new_texts(where: str, columns: Sequence[str]) -> list[New]:
    """The texts of `job.inputs=WHERE`: of tables these columns, of other files their lines. Refusal: there are none."""
    found: list[New] = []
    for path in map(Path, listed(where, ENDINGS, listing=False)):
        try:
            with _opened(path) as file:
                found += [_checked(f"{path}:{line}", row, columns) for line, row in _rows(path, file, columns)]
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise Refusal(f"job.inputs={where}: {path} cannot be read as texts: {error}") from error
    if not found:
        raise Refusal(f"job.inputs={where}: there is no text in it")
    return found


def _opened(path: Path) -> IO[str]:
    form: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    return gzip.open(path, "rt", **form) if path.suffix == ".gz" else path.open(**form)


def _rows(path: Path, file: IO[str], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The number of each line, and what stands there: its columns, or why it has none."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind in SEPARATORS:
        rows = csv.DictReader(file, delimiter=SEPARATORS[kind])
        for name in columns:
            if name not in (there := list(rows.fieldnames or ())):
                raise Refusal(
                    f"job.inputs: {path} has no column {name}; it has {', '.join(there)}{did_you_mean(name, there)}"
                )
        yield from ((rows.line_num, row) for row in rows)
    elif kind == ".jsonl":
        yield from ((at, _parsed(line)) for at, line in enumerate(file, 1) if line.strip())
    elif len(columns) > 1:
        raise Refusal(f"job.inputs: {path}: the run reads pairs, {' and '.join(columns)}; use a CSV, TSV or JSONL file")
    else:
        yield from ((at, {columns[0]: line.rstrip("\r\n")}) for at, line in enumerate(file, 1) if line.strip())


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return error


def _checked(name: str, row: Any, columns: Sequence[str]) -> New:
    if isinstance(row, Exception):
        return New(name, [], f"is no JSON: {row}")
    texts = [row[column] for column in columns if isinstance(row.get(column), str)] if isinstance(row, dict) else []
    if len(texts) < len(columns):
        return New(name, [], f"has no text in {' and '.join(columns)}")
    if any("\udc80" <= sign <= "\udcff" for text in texts for sign in text):
        return New(name, [], "is no UTF-8 text")
    return New(name, texts, "")
