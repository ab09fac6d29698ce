"""The rows of a CSV, TSV or JSONL file, plain or gzipped."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from recipes.gzipped import unpacked
from trainer.messages import Refusal, did_you_mean, escape_line

csv.field_size_limit(2**31 - 1)  # a cell may hold a whole document: of the process, and 131,072 signs before
SEPARATORS = {".csv": ",", ".tsv": "\t"}


def table(path: Path, key: str) -> list[dict[str, Any]]:
    """Each row by its columns. Refusal, for the key that named the file, where it cannot be read."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in (*SEPARATORS, ".jsonl"):
        raise Refusal(f"{key}={path}: a file of rows ends in .csv, .tsv or .jsonl, or in one of these and .gz")
    try:
        with (
            TextIOWrapper(BytesIO(unpacked(path)), encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            if kind == ".jsonl":
                return [json.loads(line) for line in file if line.strip()]
            return list(csv.DictReader(file, delimiter=SEPARATORS[kind]))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, csv.Error) as error:
        raise Refusal(f"{key}={path} cannot be read as rows: {error}") from error


def column(rows: Sequence[dict[str, Any]], name: str, key: str, path: Path, filled: bool = False) -> list[Any]:
    """One value of each row; filled: of which none is an empty text. Refusal where a row does not have it."""
    for at, row in enumerate(rows):
        if isinstance(row, dict) and name in row and (row[name] is None or (filled and not str(row[name]).strip())):
            raise Refusal(
                f"{key}={name}: row {at + 1} of {path} has nothing in this column; fill it in, or leave the row out"
            )
        if not isinstance(row, dict) or row.get(name) is None:
            there = [escape_line(each) for each in row] if isinstance(row, dict) else []
            raise Refusal(
                f"{key}={name}: row {at + 1} of {path} has no such column; it has {', '.join(there)}"
                + did_you_mean(name, there)
            )
    return [row[name] for row in rows]
