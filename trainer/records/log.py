"""What a run says about itself: metrics.jsonl, the log of the main rank, and the sinks that were asked for."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from trainer.launch.durable import replace_file
from trainer.records.console import Console, evaluation_words, training_words
from trainer.records.tensorboard import TensorBoard

__all__ = ["Console", "Log", "Sink", "TensorBoard"]

Line = Mapping[str, Any]


@runtime_checkable
class Sink(Protocol):
    """A place where figures go, on the main rank alone. `conf/log` names them; `open` comes once, before any figure."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """The run's folder, the step it starts from, and the steps and epochs it is going to, where they are known."""

    def start(self, fact: str) -> None:
        """One sentence about the run; may come before `open`."""

    def train(self, line: Line) -> None:
        """Figures of a training step."""

    def eval(self, line: Line) -> None:
        """Figures of an evaluation."""

    def images(self, tag: str, images: Tensor, step: int) -> None:
        """A batch of images (B, C, H, W) as the network sees them."""

    def text(self, tag: str, text: str) -> None:
        """A longer text, such as the configuration."""

    def flush(self) -> None:
        """Hand on what is still held back."""

    def close(self) -> None:
        """The last call."""


class Log:
    """Figures and sentences of a run, to its files and to the sinks. On other ranks than the main one it is idle."""

    def __init__(self, folder: Path, sinks: Sequence[Sink], is_main: bool):
        self.folder, self.is_main = folder, is_main
        self.sinks = list(sinks) if is_main else []
        self._figures = _Lines(folder / "metrics.jsonl") if is_main else None
        self._words = _Lines(folder / "logs" / "rank-0.log") if is_main else None

    def rewind(
        self, step: int, steps: int | None = None, epochs: int | None = None, evaluated: int | None = None
    ) -> None:
        """Begin after this step (0: from nothing) on the way to `steps`: what was logged of later ones is dropped.

        `evaluated`: the last step whose evaluation is done, where that is not the same.
        """
        last = {"train": step, "eval": step if evaluated is None else evaluated}
        if self._figures is not None:
            self._figures.rewrite(lambda data: b"".join(_until(last, data)))
        for sink in self.sinks:
            sink.open(self.folder, step, steps, epochs)

    def start(self, facts: Sequence[str]) -> None:
        """Say something about the run, a sentence a line."""
        for fact in facts:
            self._note(fact)
            for sink in self.sinks:
                sink.start(fact)

    def train(self, line: Line) -> None:
        """Log the figures of a training step."""
        self._append("train", line)
        self._note(training_words(line))
        for sink in self.sinks:
            sink.train(line)

    def eval(self, line: Line) -> None:
        """Log the figures of an evaluation."""
        self._append("eval", line)
        self._note(evaluation_words(line))
        for sink in self.sinks:
            sink.eval(line)

    def images(self, tag: str, images: Any, step: int) -> None:
        """Show a batch of images (B, C, H, W) as the network sees them; inputs of other shapes are no images."""
        if isinstance(images, Tensor) and images.dim() == 4:
            for sink in self.sinks:
                sink.images(tag, images.detach(), step)

    def text(self, tag: str, text: str) -> None:
        """Keep a longer text, such as the configuration."""
        for sink in self.sinks:
            sink.text(tag, text)

    def flush(self) -> None:
        """Hand on what is still held back; before a checkpoint counts as saved."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """End the log. A second call does nothing."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []
        for file in (self._figures, self._words):
            if file is not None:
                file.close()
        self._figures = self._words = None

    def _append(self, kind: str, line: Line) -> None:
        """One line of metrics.jsonl. Numbers that are none stand there as Python writes them: NaN, Infinity."""
        if self._figures is not None:
            ordered = {"kind": kind, **{key: line[key] for key in ("step", "epoch") if key in line}, **line}
            self._figures.append(json.dumps(ordered))

    def _note(self, text: str) -> None:
        if self._words is not None:
            self._words.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


class _Lines:
    """A file that grows by whole lines, each appended in one write."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def append(self, line: str) -> None:
        """Add a line. OSError where it does not fit on the disk; no half of it stays then."""
        data = line.encode() + b"\n"
        written = os.write(self._file, data)
        if written < len(data):
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"{self.path}: no space left for a line")

    def rewrite(self, change: Any) -> None:
        """Replace the content in one step."""
        before = self.path.read_bytes()
        after = change(before)
        if after != before:
            os.close(self._file)
            replace_file(self.path, after)
            self._open()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _until(last: Mapping[str, int], data: bytes) -> Iterator[bytes]:
    """The whole lines up to the last step of their kind. What a crash tore is no line."""
    for line in data.splitlines(keepends=True):
        try:
            said = json.loads(line)
            if line.endswith(b"\n") and said["step"] <= last[said["kind"]]:
                yield line
        except (ValueError, KeyError, TypeError):
            continue
