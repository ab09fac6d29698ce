"""Figures for people: a progress line on a terminal, a plain line a log event elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_UNSAID = ("kind", "step", "epoch", "samples", "time")
_CLEAR = "\r\x1b[2K"  # back to the start of the line, and empty it


class Console:
    """Progress on the screen. No thread, no captured output, no hidden cursor: a debugger's prompt works in between."""

    def __init__(self) -> None:
        self._steps: int | None = None
        self._epochs: int | None = None
        self._first: tuple[int, float] | None = None  # step and clock of the first line
        self._last: str | None = None  # the progress line that stands on the terminal
        self._drawn = 0.0

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Where the run is going."""
        self._steps, self._epochs = steps, epochs

    def start(self, fact: str) -> None:
        """Print a sentence."""
        self._print(fact)

    def train(self, line: Mapping[str, Any]) -> None:
        """Print where training is, or redraw it on a terminal."""
        words = training_words(line, self._steps, self._epochs, self._left(line))
        if not _is_terminal():
            self._print(words)
        else:
            self._last = words
            if monotonic() - self._drawn > 0.1:  # seconds; more often than the eye can follow is waste
                self._draw(int(line["step"]), words)

    def eval(self, line: Mapping[str, Any]) -> None:
        """Print the figures of an evaluation."""
        self._print(evaluation_words(line))

    def images(self, tag: str, images: Tensor, step: int) -> None:
        """Pictures have no place here."""

    def text(self, tag: str, text: str) -> None:
        """Nor do long texts."""

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Take the progress line away; what it said last, the last words of the run say better."""
        if self._last is not None:
            _write(_CLEAR)
            self._last = None

    def _print(self, words: str) -> None:
        clear, self._last = (_CLEAR if self._last is not None else ""), None
        _write(f"{clear}{words}\n")

    def _draw(self, step: int, words: str) -> None:
        """Put the progress line in the place of the one before."""
        from rich.console import Console as Screen
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        screen = Screen(highlight=False)
        row = Table.grid(padding=(0, 1))
        if self._steps:
            row.add_column(width=20)
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = [ProgressBar(total=self._steps, completed=step)] if self._steps else []
        row.add_row(*bar, Text(words))
        with screen.capture() as drawn:
            screen.print(row, end="")
        _write(_CLEAR + drawn.get().rstrip())
        self._drawn = monotonic()

    def _left(self, line: Mapping[str, Any]) -> float | None:
        """Seconds to the end at the pace so far, evaluations and saves included."""
        step, now = int(line["step"]), monotonic()
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        pace = (now - since) / (step - first) if step > first else line.get("step_s")
        return None if self._steps is None or pace is None else max(self._steps - step, 0) * pace


def training_words(
    line: Mapping[str, Any], steps: int | None = None, epochs: int | None = None, left: float | None = None
) -> str:
    """A training line in words: `epoch  3/30  step  360/4200  loss 0.2134  12,345 samples/s  0:41 left`."""
    parts = []
    if "epoch" in line:
        parts.append(f"epoch {_of(line['epoch'] + 1, epochs)}")
    parts.append(f"step {_of(line['step'], steps)}")
    parts.append(f"loss {number(line.get('loss', float('nan')))}")
    if "samples_per_s" in line:
        parts.append(f"{line['samples_per_s']:>9,.0f} samples/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def evaluation_words(line: Mapping[str, Any]) -> str:
    """An evaluation line in words: `eval  step 360  loss 0.2134  accuracy  97.8 %`."""
    parts = ["eval", f"step {line['step']}"]
    for name, value in line.items():
        if name not in _UNSAID and isinstance(value, (int, float)):
            share = name == "accuracy" or name.endswith("_accuracy")
            parts.append(f"{name} {percent(value) if share else number(value)}")
    return "  ".join(parts)


def number(value: float) -> str:
    """Four digits after the point, or as many that matter where that would say too little or too much."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share of 1 as per cent: ` 97.8 %`."""
    return f"{share * 100:5.1f} %"


def duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are some: `0:41`, `1:02:03`."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


def _of(count: int, total: int | None) -> str:
    return str(count) if total is None else f"{count:>{len(str(total))}}/{total}"


def _write(text: str) -> None:
    """Show this at once. A run outlives whoever watches it: a closed pipe is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
