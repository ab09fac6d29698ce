"""The classes of new inputs: the best of each with their probabilities, a row for each input in two files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from trainer.jobs.network_outputs import Piece
from trainer.learning.task import Task
from trainer.plain_numbers import counted
from trainer.records.prediction_files import Table, json_line
from trainer.refusal import BadData, Refusal

_BEST = 5  # classes of an input whose probabilities are written
_SHOWN = 20  # inputs, or damaged ones, on the screen


def refuse_task(task: Task) -> None:
    """Refuse a task whose outputs are no classes."""
    if type(task).probabilities is Task.probabilities:
        raise Refusal(
            f"job.inputs gives the class of each input, and {type(task).__name__} does not say how its outputs are"
            " classes: def probabilities(self, output), (samples, classes). job=predict without job.inputs writes the"
            " outputs of the data's own sets, and job=generate continues a text"
        )


def best(task: Task, output: Any, damaged: Tensor) -> dict[str, Tensor]:
    """The best classes of each sample, (B, 5) or fewer, and whether it is one that could not be read, (B,)."""
    probabilities = task.probabilities(output)
    if probabilities is None or probabilities.dim() != 2:
        raise BadData(
            f"job.inputs gives the class of each input, and the network's output is none for {type(task).__name__}:"
            " expected scores (samples, classes)"
        )
    top = probabilities.topk(min(_BEST, probabilities.shape[1]), dim=1)
    return {"probability": top.values, "class": top.indices, "damaged": damaged}


class Classified:
    """Writes `file,class,probability`, and JSON with the best five classes; remembers what is for the screen.

    samples: has `name(i)`, and `error(i)` for one that could not be read.
    """

    def __init__(self, table: IO[bytes], lines: IO[bytes], samples: Any, names: Sequence[str]) -> None:
        self._table, self._lines = Table(table, ("file", "class", "probability")), lines
        self._samples, self._names = samples, names
        self._count = self._bad = 0
        self._shown: list[str] = []
        self._damaged: list[str] = []

    def add(self, first: int, piece: Piece) -> None:
        """The rows of the inputs from this one on."""
        rows = zip(*(piece[name].tolist() for name in ("probability", "class", "damaged")), strict=True)
        for at, (probabilities, numbers, damaged) in enumerate(rows, first):
            error = self._samples.error(at) if damaged else None
            if error is None and not all(map(math.isfinite, probabilities)):
                error = "the network's answer is not finite"
            named = {} if error else {self._name(n): _rounded(p) for n, p in zip(numbers, probabilities, strict=True)}
            self._write(self._samples.name(at), named, error)

    def _write(self, file: str, named: dict[str, float], error: str | None) -> None:
        word, probability = next(iter(named.items()), (None, None))
        self._table.add((file, "" if word is None else word, "" if probability is None else f"{probability:g}"))
        json_line(self._lines, {"file": file, "class": word, "probabilities": named, "error": error})
        self._count += 1
        self._bad += error is not None
        if error and self._bad <= _SHOWN:
            self._damaged.append(f"  {visible(file)}: {visible(error)}")
        elif not error and len(self._shown) <= _SHOWN:
            said = ", ".join(f"{visible(name)} {100 * share:.1f} %" for name, share in named.items())
            self._shown.append(f"{visible(file)}  {said}")

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)

    def lines(self) -> list[str]:
        """For the screen: the answers where they are few, and what could not be read."""
        read = self._count - self._bad
        many = [f"classified  {counted(read, 'input')} of {self._count:,}"]
        more = [f"  … and {self._bad - _SHOWN:,} more; the error of each is in its row"] if self._bad > _SHOWN else []
        damaged = [f"damaged     {self._bad:,} of {counted(self._count, 'input')}", *self._damaged, *more]
        return [*(self._shown if read <= _SHOWN else many), *(damaged if self._bad else [])]

    def refusal(self, what: str, path: Path) -> str:
        """Why there is no answer at all; empty where there is one."""
        if self._bad < self._count:
            return ""
        return f"{what}: none of {counted(self._count, 'input')} could be read; the reason of each is in {path}"


def _rounded(probability: float) -> float:
    return float(f"{probability:.6g}")


def visible(text: str) -> str:
    """A name for the screen: what would move a cursor, or is no text, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
