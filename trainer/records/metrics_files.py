"""metrics.jsonl: the metrics of a run, whatever other sinks it has."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.launch.safe_files import disk_full_error, make_folder, open_file
from trainer.messages import format_count
from trainer.records.metrics_reader import parse_line, read_lines_backwards
from trainer.records.sinks import Line, Sink, WriteDeferred

_MAX_WAITING = 50_000  # lines that wait for room on the disk; some 20 MB


class MetricsFile(Sink):
    """metrics.jsonl: a JSON object a line; no step stands there twice, and a kill tears the last line at most.

    Lines for which the disk has no room wait in memory, in their order.
    """

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Take back what an earlier attempt logged after this step."""
        self._path, self._start = folder / "metrics.jsonl", step
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._wanted: dict[str, int] = {}  # how far the file is to be cut back, where that failed
        self._dropped = 0
        make_folder(folder)
        open_file(self._path, "ab").close()
        self._cut({"train": step, "eval": step})

    def train(self, line: Line) -> None:
        """Append the figures of a training step."""
        # at once, so that a kill loses nothing
        self._append("train", line)

    def eval(self, line: Line) -> None:
        """Append the figures of an evaluation."""
        # one that a resumed run makes up for: an attempt that was killed before its save may have written it already
        if line["step"] == self._start:
            self._wanted = {"train": self._start, "eval": self._start - 1}
        self._append("eval", line)

    def flush(self) -> None:
        """Write the lines that wait; Waiting where there is no room."""
        try:
            if self._wanted:
                self._cut(self._wanted)
                self._wanted = {}
            self._write()
        except OSError as error:
            # half a line would be glued to the next one; where this fails, too, the next try begins with it
            with contextlib.suppress(OSError), open_file(self._path, "r+b", buffering=0) as file:
                file.truncate(self._size)
            waiting = format_count(len(self._waiting), "line")
            raise WriteDeferred(f"{self._path}: {error.strerror or error}; waiting for room: {waiting}") from error

    def close(self) -> None:
        """Write what waits; OSError that says how many lines found no room to the end."""
        with contextlib.suppress(OSError):
            self.flush()
        # nobody comes after this that could write them
        if lost := len(self._waiting) + self._dropped:
            raise OSError(f"{self._path}: {format_count(lost, 'line')} found no room on the disk")

    def _append(self, kind: str, line: Line) -> None:
        """Numbers that are none stand there as Python writes them: NaN, Infinity."""
        ordered = {"kind": kind, **{key: line[key] for key in ("step", "epoch") if key in line}, **line}
        self._dropped += len(self._waiting) == _MAX_WAITING  # the oldest goes
        self._waiting.append(json.dumps(ordered).encode() + b"\n")
        self.flush()

    def _write(self) -> None:
        """Append the lines that wait, each in one call: other programs read this file while it grows."""
        if not self._waiting:
            return
        with open_file(self._path, "ab", buffering=0) as file:
            # what is behind the last whole line is half a line, or what a file server took and lost
            if file.tell() != self._size:
                file.truncate(self._size)
            while self._waiting:
                line = self._waiting[0]
                if file.write(line) < len(line):
                    raise disk_full_error(self._path)
                self._size += len(line)
                self._waiting.popleft()

    def _cut(self, last: Mapping[str, int]) -> None:
        """Keep the lines up to the last step of their kind. Only what goes is read, and the line before it."""
        with open_file(self._path, "r+b", buffering=0) as file:
            size, following = file.seek(0, os.SEEK_END), b""
            self._size, kept_lines = size, b""
            for offset, line in read_lines_backwards(self._path):
                fields = parse_line(line)
                if not _is_kept(fields, last):
                    self._size, kept_lines = offset, following
                elif fields is not None and fields["step"] <= min(last.values()):
                    break  # lines stand in the order of their steps
                else:
                    following = line + following
            if self._size < size:
                # nothing is written anew: a kill in between leaves whole lines
                file.truncate(self._size)
                file.seek(self._size)
                self._size += file.write(kept_lines)
                os.fsync(file.fileno())


def _is_kept(fields: Mapping[str, Any] | None, last_steps: Mapping[str, int]) -> bool:
    """Is this a line up to the last step of its kind? What a crash tore is no line."""
    if fields is None or not isinstance(fields.get("step"), int):
        return False
    return fields["step"] <= last_steps.get(str(fields.get("kind")), -1)
