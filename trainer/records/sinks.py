"""Where a run's figures and sentences go: all its sinks as one."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.parallel.histograms import Histogram
from trainer.plain_numbers import counted
from trainer.records.loss_spikes import Spikes
from trainer.refusal import first_line
from trainer.safe_names import shown_lines

Line = Mapping[str, Any]
NO_FIGURES = ("kind", "step", "epoch", "samples", "time")  # keys of a line that say what it is about
_console = logging.getLogger(__name__)  # the screen and the log file


class Waiting(OSError):
    """A sink cannot write now. Nothing is lost: it tries again at the next call."""


class Sink:
    """A logger, on the main rank only. Override the methods that it needs; the others do nothing.

    `conf/log` lists those of a run. `open` is called once, before any metrics.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """The run's folder, the step where this start begins, and the planned end in steps and epochs, if known."""

    def say(self, fact: str) -> None:
        """One sentence about the run; may come before `open`."""

    def train(self, line: Line) -> None:
        """Metrics of a training step."""

    def eval(self, line: Line) -> None:
        """Metrics of an evaluation."""

    def images(self, tag: str, images: Tensor, step: int, words: Sequence[str] = ()) -> None:
        """Images (B, C, H, W), 0 black to 1 white; `words`: a short text below each, or none."""

    def confusion(self, tag: str, counts: Tensor, step: int, names: Sequence[str] = ()) -> None:
        """A confusion matrix: (classes, classes), row = true class, column = predicted class."""

    def histograms(self, kind: str, histograms: Mapping[str, Histogram], step: int) -> None:
        """Histograms by the names of parameters; kind: `weights` or `gradients`."""

    def text(self, tag: str, text: str) -> None:
        """A longer text, such as the configuration."""

    def sample(self, text: str, step: int) -> None:
        """A text that a language model has written after an evaluation."""

    def rewind(self, step: int) -> None:
        """The run has gone back to this step: take back what was logged of later ones, for they come again."""

    def flush(self) -> None:
        """Write out everything that is buffered."""

    def end(self, state: str) -> None:
        """The run has ended: completed, preempted or failed; only `close` is called after this."""

    def close(self) -> None:
        """The last call."""


def shows(sink: Sink, *verbs: str) -> bool:
    """Does the sink do anything when one of these verbs is called?"""
    return any(getattr(type(sink), verb) is not getattr(Sink, verb) for verb in verbs)


class Log(Sink):
    """All sinks of a run as one. On other ranks than the main one there are none, and nothing happens.

    A sink that cannot write, as on a full disk, says so once, and the run continues. Only `open` must succeed.
    """

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks, self._spikes = list(sinks), Spikes()
        self._lost: dict[int, int] = {}  # sinks (by id) that could not write when last called → calls that are lost

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Begin after this step (0: from nothing): what was logged of later ones is dropped."""
        for sink in self.sinks:
            sink.open(folder, step, steps, epochs)

    def say(self, fact: str) -> None:
        """Say something about the run."""
        self._each("say", shown_lines(fact))

    def train(self, line: Line) -> None:
        """Log the figures of a training step, and a word where the loss has jumped."""
        self._each("train", line)
        for jump in self._spikes.look(line["step"], line["loss_mean"]):
            self.say(f"note        {jump}")

    def eval(self, line: Line) -> None:
        """Log the figures of an evaluation."""
        self._each("eval", line)

    def images(self, tag: str, images: Tensor, step: int, words: Sequence[str] = ()) -> None:
        """Show images (B, C, H, W), with words below them."""
        self._each("images", tag, images.detach(), step, words)

    def confusion(self, tag: str, counts: Tensor, step: int, names: Sequence[str] = ()) -> None:
        """Show a confusion matrix (classes, classes)."""
        self._each("confusion", tag, counts, step, names)

    def histograms(self, kind: str, histograms: Mapping[str, Histogram], step: int) -> None:
        """Show how numbers are distributed."""
        self._each("histograms", kind, histograms, step)

    def text(self, tag: str, text: str) -> None:
        """Keep a longer text, such as the configuration."""
        self._each("text", tag, text)

    def sample(self, text: str, step: int) -> None:
        """Show what a language model writes."""
        self._each("sample", text, step)

    def rewind(self, step: int) -> None:
        """Take back what was logged of steps after this one."""
        self._spikes = Spikes()
        self._each("rewind", step)

    def flush(self) -> None:
        """Hand on what is still held back; before a checkpoint counts as saved."""
        self._each("flush")

    def end(self, state: str) -> None:
        """Say how the run ended."""
        self._each("end", state)

    def close(self) -> None:
        """End the log. A second call does nothing."""
        self._lost.clear()  # what is not written now never will be, whatever was said before
        self._each("close")
        self.sinks.clear()

    def _each(self, verb: str, *values: Any) -> None:
        """Call all sinks, whichever cannot write; what it says the first time is shown, and that it writes again."""
        for sink in self.sinks:
            try:
                getattr(sink, verb)(*values)
            except OSError as error:
                if id(sink) not in self._lost:
                    name = type(sink).__name__
                    _console.warning("note        %s cannot write, and the run continues: %s", name, first_line(error))
                self._lost[id(sink)] = self._lost.get(id(sink), 0) + (not isinstance(error, Waiting))
            else:
                # a call that does nothing has shown nothing
                if id(sink) in self._lost and shows(sink, verb):
                    lost = self._lost.pop(id(sink))
                    what = f"{counted(lost, 'call')} meanwhile were lost" if lost else "nothing was lost"
                    _console.warning("note        %s writes again; %s", type(sink).__name__, what)
