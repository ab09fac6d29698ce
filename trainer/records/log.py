"""Where a run's figures and sentences go: metrics.jsonl, and the sinks that were asked for."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.launch.durable import replace_file

Line = Mapping[str, Any]
NO_FIGURES = ("kind", "step", "epoch", "samples", "time")  # keys of a line that say what it is about


class Sink:
    """A place where figures go, on the main rank alone: override what it needs, the rest does nothing.

    `conf/log` names those of a run. `open` comes once, before any figure.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """The run's folder, the step it starts from, and the steps and epochs it is going to, where they are known."""

    def say(self, fact: str) -> None:
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


class Log(Sink):
    """All sinks of a run as one. On other ranks than the main one there are none, and nothing happens."""

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Begin after this step (0: from nothing): what was logged of later ones is dropped."""
        for sink in self.sinks:
            sink.open(folder, step, steps, epochs)

    def say(self, fact: str) -> None:
        """Say something about the run."""
        for sink in self.sinks:
            sink.say(fact)

    def train(self, line: Line) -> None:
        """Log the figures of a training step."""
        for sink in self.sinks:
            sink.train(line)

    def eval(self, line: Line) -> None:
        """Log the figures of an evaluation."""
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
        while self.sinks:
            self.sinks.pop(0).close()


class Figures(Sink):
    """metrics.jsonl: a JSON object a line; no step stands there twice, and a kill tears the last line at most."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Take back what an earlier attempt logged after this step."""
        self._path, self._start = folder / "metrics.jsonl", step
        folder.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._cut({"train": step, "eval": step})

    def train(self, line: Line) -> None:
        """Append the figures of a training step."""
        self._append("train", line)

    def eval(self, line: Line) -> None:
        """Append the figures of an evaluation."""
        # one that a resumed run makes up for: an attempt that was killed before its save may have written it already
        if line["step"] == self._start:
            self._cut({"train": self._start, "eval": self._start - 1})
        self._append("eval", line)

    def _append(self, kind: str, line: Line) -> None:
        """Numbers that are none stand there as Python writes them: NaN, Infinity. OSError where there is no space."""
        ordered = {"kind": kind, **{key: line[key] for key in ("step", "epoch") if key in line}, **line}
        data = json.dumps(ordered).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            written = file.write(data)  # in one call: other programs read this file while it grows
            if written < len(data):
                # half a line would be glued to the next one
                with contextlib.suppress(OSError):
                    file.truncate(self._path.stat().st_size - written)
                raise OSError(f"{self._path}: no space left for a line")

    def _cut(self, last: Mapping[str, int]) -> None:
        """Keep the lines up to the last step of their kind, in one step."""
        before = self._path.read_bytes()
        after = b"".join(_until(last, before))
        if after != before:
            replace_file(self._path, after)


def _until(last: Mapping[str, int], data: bytes) -> Iterator[bytes]:
    """The whole lines up to the last step of their kind. What a crash tore is no line."""
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            if line.endswith(b"\n") and said["step"] <= last[said["kind"]]:
                yield line
