"""What a run leaves for others to read: its lines, its status, its checkpoints."""

from __future__ import annotations

import json
import os
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_TAIL = 16_384  # bytes; longer than some lines


class Left:
    """The folder of a run, read while the run writes to it."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, path / "metrics.jsonl"

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl of one kind."""
        return [line for line in _whole(_read(self.metrics)) if line["kind"] == kind]

    def step(self) -> int:
        """The last step that was logged."""
        end = _read(self.metrics, _TAIL)
        return max((line["step"] for line in _whole(end) if line["kind"] == "train"), default=0)

    def pace(self) -> float:
        """Seconds from one line to the next, of the last two."""
        times = [line["time"] for line in _whole(_read(self.metrics, _TAIL)) if line["kind"] == "train"][-2:]
        return max(0.0, times[-1] - times[0]) if times else 0.0

    def status(self) -> dict[str, Any]:
        """status.json; empty while there is none."""
        try:
            return json.loads((self.path / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def checkpoints(self) -> list[Path]:
        """The checkpoints that are whole, oldest first."""
        return sorted(path.parent for path in self.path.glob("checkpoints/step-*/manifest.json"))

    def tensors(self) -> Counter[tuple[str, str]]:
        """Name and SHA-256 of all tensors of the last checkpoint, and of a sharded one of each shard.

        Not in which file each is: that of several ranks which hold a tensor one writes it is no matter.
        """
        found: Counter[tuple[str, str]] = Counter()
        for file in self.checkpoints()[-1].glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    one = opened.get_tensor(name)
                    bits = one.reshape(-1).view(torch.uint8).numpy().tobytes()
                    found[name, sha256(f"{one.dtype} {[*one.shape]}".encode() + bits).hexdigest()] += 1
        return found


def _read(path: Path, last: int | None = None) -> bytes:
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read()
    except FileNotFoundError:
        return b""


def _whole(data: bytes) -> list[dict[str, Any]]:
    """The lines that are JSON: of the first the beginning may be missing, of the last the end."""
    found = []
    for line in data.splitlines(keepends=True):
        try:
            said = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(said, dict):
            found.append(said)
    return found
