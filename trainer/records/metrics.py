"""metrics.jsonl: the figures of a run, whatever other sinks it has."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.counted import counted
from trainer.launch.durable import full, replace_file
from trainer.records.log import Line, Sink, Waiting

_MOST = 50_000  # lines that wait for room on the disk; some 20 MB


class Figures(Sink):
    """metrics.jsonl: a JSON object a line; no step stands there twice, and a kill tears the last line at most.

    Lines for which the disk has no room wait in memory, in their order.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Take back what an earlier attempt logged after this step."""
        self._path, self._start = folder / "metrics.jsonl", step
        self._waiting: deque[bytes] = deque(maxlen=_MOST)
        self._wanted: dict[str, int] = {}  # how far the file is to be cut back, where there was no room to do it
        self._dropped = 0
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
            self._wanted = {"train": self._start, "eval": self._start - 1}
        self._append("eval", line)

    def rewind(self, step: int) -> None:
        """Take back the lines of steps after this one, also those that wait."""
        last = {"train": step, "eval": step}
        self._waiting = deque(_until(last, b"".join(self._waiting)), maxlen=_MOST)
        self._wanted = {kind: min(step, self._wanted.get(kind, step)) for kind in last}
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait; Waiting where there is no room."""
        try:
            if self._wanted:
                self._cut(self._wanted)
                self._wanted = {}
            self._write()
        except OSError as error:
            # half a line would be glued to the next one; where this fails, too, the next try begins with it
            with contextlib.suppress(OSError):
                os.truncate(self._path, self._size)
            waiting = counted(len(self._waiting), "line")
            raise Waiting(f"{self._path}: {error.strerror or error}; waiting for room: {waiting}") from error

    def close(self) -> None:
        """Write what waits; OSError that says how many lines found no room to the end."""
        with contextlib.suppress(OSError):
            self.flush()
        if lost := len(self._waiting) + self._dropped:
            raise OSError(f"{self._path}: {counted(lost, 'line')} found no room on the disk")

    def _append(self, kind: str, line: Line) -> None:
        """Numbers that are none stand there as Python writes them: NaN, Infinity."""
        ordered = {"kind": kind, **{key: line[key] for key in ("step", "epoch") if key in line}, **line}
        self._dropped += len(self._waiting) == _MOST  # the oldest goes
        self._waiting.append(json.dumps(ordered).encode() + b"\n")
        self.flush()

    def _write(self) -> None:
        """Append the lines that wait, each in one call: other programs read this file while it grows."""
        if not self._waiting:
            return
        with self._path.open("ab", buffering=0) as file:
            # what is behind the last whole line is half a line, or what a file server took and lost
            if file.tell() != self._size:
                file.truncate(self._size)
            while self._waiting:
                line = self._waiting[0]
                if file.write(line) < len(line):
                    raise full(self._path)
                self._size += len(line)
                self._waiting.popleft()

    def _cut(self, last: Mapping[str, int]) -> None:
        """Keep the lines up to the last step of their kind, in one step."""
        before = self._path.read_bytes()
        after = b"".join(_until(last, before))
        if after != before:
            replace_file(self._path, after)
        self._size = len(after)  # bytes of whole lines


def _until(last: Mapping[str, int], data: bytes) -> Iterator[bytes]:
    """The whole lines up to the last step of their kind. What a crash tore is no line."""
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            if line.endswith(b"\n") and said["step"] <= last[said["kind"]]:
                yield line
