"""Figures for people: a progress line on a terminal, a plain line a log event elsewhere and in the log file."""

import contextlib
import os
import sys
from pathlib import Path
from time import monotonic

from trainer.launch.rank_output import append_to_log, log_path
from trainer.launch.safe_files import disk_full_error
from trainer.messages import format_duration, format_number
from trainer.records.sinks import Line, Sink, measured_values

_CLEAR = "\r\x1b[2K"  # back to the start of the line, and empty it


class Console(Sink):
    """Progress on the screen. No thread, no captured output, no hidden cursor: a debugger's prompt works in between."""

    def __init__(self) -> None:
        self._stands = False  # a progress line, on the terminal
        self._drawn = 0.0  # when, by the clock

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Where the run is going."""
        self._steps, self._epochs = steps, epochs
        self._first: tuple[int, float] | None = None  # step and clock of the first line

    def say(self, fact: str) -> None:
        """Print a sentence; a progress line gives way to it."""
        _write(f"{_CLEAR if self._stands else ''}{fact}\n")
        self._stands = False

    def train(self, line: Line) -> None:
        """Print where training is, or redraw it on a terminal."""
        words = format_training_line(line, self._steps, self._epochs, self._seconds_left(line))
        # a log file of Slurm or Kubernetes: a line each, nothing is redrawn
        if not _is_terminal():
            self.say(words)
        # more often than the eye can follow is waste; but what an evaluation took away comes back with the next line
        elif not self._stands or monotonic() - self._drawn > 0.1:  # seconds
            self._draw(int(line["step"]), words)

    def eval(self, line: Line) -> None:
        """Print the figures of an evaluation."""
        self.say(format_evaluation_line(line))

    def close(self) -> None:
        """Take the progress line away; what it said last, the last words of the run say better."""
        _write(_CLEAR if self._stands else "")
        self._stands = False

    def _seconds_left(self, line: Line) -> float | None:
        """To the end at the pace so far, evaluations and saves included; None where the end is not known."""
        step, now = int(line["step"]), monotonic()
        # from the first line on: the first steps take longer than all others
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        pace = (now - since) / (step - first) if step > first else line["step_s"]
        return None if self._steps is None else max(self._steps - step, 0) * pace

    def _draw(self, step: int, words: str) -> None:
        """Put the progress line in the place of the one before."""
        from rich.console import Console as Screen
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        # the words after the bar end where the terminal does: a line that wraps could not be taken away
        row = Table.grid(padding=(0, 1))
        row.add_column()
        row.add_column(no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(total=self._steps, completed=step, width=20), Text(words))
        # rich draws into a text, and we write it: rich alone could not stay in one line without a thread of its own
        screen = Screen(highlight=False)
        with screen.capture() as drawn:
            screen.print(row, end="")
        _write(_CLEAR + drawn.get().rstrip())
        self._stands, self._drawn = True, monotonic()


class LogFile(Sink):
    """The same words, with the time, in logs/rank-0.log."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Where the run lies."""
        self._folder = folder

    def say(self, fact: str) -> None:
        """Write a sentence."""
        if not append_to_log(fact, self._folder, 0):
            raise disk_full_error(log_path(self._folder, 0))

    def train(self, line: Line) -> None:
        """Write where training is."""
        self.say(format_training_line(line))

    def eval(self, line: Line) -> None:
        """Write the figures of an evaluation."""
        self.say(format_evaluation_line(line))


def format_training_line(
    line: Line, steps: int | None = None, epochs: int | None = None, left: float | None = None
) -> str:
    """A training line in words: `epoch  3/30  step  360/4200  loss 0.2134  12,345 samples/s  0:41 left`."""
    words = [f"epoch {_format_progress(line['epoch'] + 1, epochs)}", f"step {_format_progress(line['step'], steps)}"]
    # always there
    words += [f"loss {format_number(line['loss'])}", f"{line['samples_per_s']:>9,.0f} samples/s"]
    # of what only some runs have
    words += [f"{line['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in line else []
    words += [f"{100 * line['utilisation']:.1f} % of peak"] if "utilisation" in line else []
    if left is not None:
        words.append(f"{format_duration(left)} left")
    return "  ".join(words)


def format_evaluation_line(line: Line) -> str:
    """An evaluation line in words: `eval  step 360  loss 0.2134  accuracy  97.8 %`."""
    words = ["eval", f"step {line['step']}"]
    words += [f"{name} {format_metric(name, value)}" for name, value in measured_values(line)]
    return "  ".join(words)


def format_metric(name: str, value: float) -> str:
    """A figure as people read it: accuracies in percent."""
    share = name == "accuracy" or name.endswith("_accuracy")
    return f"{value * 100:5.1f} %" if share else format_number(value)


def _format_progress(count: int, total: int | None) -> str:
    return str(count) if total is None else f"{count:>{len(str(total))}}/{total}"


def _write(text: str) -> None:
    """Show this at once. A run outlives whoever watches it: a closed pipe is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
