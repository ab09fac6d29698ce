"""Sinks: where a run's metrics and messages go. All of a run's as one `Log`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.messages import escape_text, first_line, format_count
from trainer.parallel.tensor_statistics import Histogram

Line = Mapping[str, Any]
_NOT_METRICS = ("kind", "step", "epoch", "samples", "time")  # keys of a line that say what it is about
_console = logging.getLogger(__name__)  # the screen and the log file


def measured_values(line: Line) -> Iterator[tuple[str, float]]:
    """What was measured, of all that a line says: names and numbers."""
    for name, value in line.items():
        if name not in _NOT_METRICS and isinstance(value, int | float):
            yield name, value


class WriteDeferred(OSError):
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

    def flush(self) -> None:
        """Write out everything that is buffered."""

    def end(self, state: str) -> None:
        """The run has ended: completed, preempted or failed; only `close` is called after this."""

    def close(self) -> None:
        """The last call."""


def implements(sink: Sink, *verbs: str) -> bool:
    """Does the sink do anything when one of these verbs is called?"""
    return any(getattr(type(sink), verb) is not getattr(Sink, verb) for verb in verbs)


class Log(Sink):
    """All sinks of a run as one. On other ranks than the main one there are none, and nothing happens.

    A sink that cannot write, as on a full disk, says so once, and the run continues. Only `open` must succeed.
    """

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)
        self._lost: dict[int, int] = {}  # sinks (by id) that could not write when last called → calls that are lost

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Begin after this step (0: from nothing): what was logged of later ones is dropped."""
        for sink in self.sinks:
            sink.open(folder, step, steps, epochs)

    def say(self, fact: str) -> None:
        """Say something about the run."""
        self.each_sink("say", escape_text(fact))

    def images(self, tag: str, images: Tensor, step: int, words: Sequence[str] = ()) -> None:
        """Show images (B, C, H, W), with words below them."""
        self.each_sink("images", tag, images.detach(), step, words)

    def close(self) -> None:
        """End the log. A second call does nothing."""
        self._lost.clear()  # what is not written now never will be, whatever was said before
        self.each_sink("close")
        self.sinks.clear()

    def each_sink(self, verb: str, *values: Any, **named: Any) -> None:
        """Call all sinks, whichever cannot write; what it says the first time is shown, and that it writes again."""
        for sink in self.sinks:
            try:
                getattr(sink, verb)(*values, **named)
            except OSError as error:
                if id(sink) not in self._lost:
                    name = type(sink).__name__
                    _console.warning("note        %s cannot write, and the run continues: %s", name, first_line(error))
                self._lost[id(sink)] = self._lost.get(id(sink), 0) + (not isinstance(error, WriteDeferred))
            else:
                # a call that does nothing has shown nothing
                if id(sink) in self._lost and implements(sink, verb):
                    lost = self._lost.pop(id(sink))
                    what = f"{format_count(lost, 'call')} meanwhile were lost" if lost else "nothing was lost"
                    _console.warning("note        %s writes again; %s", type(sink).__name__, what)


# What a log adds nothing to goes to every sink as it is, so those verbs and their arguments are written once, in Sink.
for _verb in ("train", "eval", "confusion", "histograms", "text", "sample", "flush", "end"):
    setattr(Log, _verb, partialmethod(Log.each_sink, _verb))
