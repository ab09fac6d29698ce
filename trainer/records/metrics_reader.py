"""metrics.jsonl read: its lines from either end, the metrics of evaluations, and which of two is better.

Nothing here needs torch.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.launch.safe_files import open_file

_BLOCK = 2**16  # bytes that are read at a time


def parse_line(line: bytes) -> dict[str, Any] | None:
    """What a line says; None for what is no whole line: a crash tore it, or a run is writing it just now."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(line) if line.endswith(b"\n") else None
        return fields if isinstance(fields, dict) else None
    return None


def read_lines(path: Path, needle: bytes = b"") -> Iterator[dict[str, Any]]:
    """What the whole lines say that have this word in them, in their order; of no file nothing."""
    if path.is_file():
        with open_file(path, "rb") as file:
            yield from (fields for line in file if needle in line and (fields := parse_line(line)) is not None)


def read_lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines from the last one to the first, each with the byte at which it begins."""
    with open_file(path, "rb") as file:
        start, rest, block = file.seek(0, os.SEEK_END), b"", _BLOCK
        while start > 0:
            size = min(block, start)
            start -= size
            file.seek(start)
            # a block of bytes, and behind it the part of a line that the block after it began with
            data = file.read(size) + rest
            end, at = len(data), data.rfind(b"\n", 0, -1)
            while at >= 0:
                yield start + at + 1, data[at + 1 : end]
                end, at = at + 1, data.rfind(b"\n", 0, at)
            # the line that this block cuts: its beginning lies in the block before
            rest = data[:end]
            block = _BLOCK if len(rest) < block else 2 * block  # a line that is longer than that
        if rest:
            # the first line of the file has no newline before it
            yield 0, rest


def read_last_lines(path: Path, kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The last line of each of these kinds in a metrics.jsonl; of some, or of a file, there may be none."""
    last: dict[str, dict[str, Any]] = {}
    # "eval", with its quotes, as it stands in a line
    wanted = {kind: json.dumps(kind).encode() for kind in kinds}
    for _, line in read_lines_backwards(path) if path.is_file() else ():
        # a look at the bytes first: a kind that there is not is looked for in the whole file
        if (
            any(needle in line for needle in wanted.values())
            and (fields := parse_line(line))
            and fields.get("kind") in wanted
        ):
            last[fields["kind"]] = fields
            del wanted[fields["kind"]]
        if not wanted:
            break
    return last


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What was measured, of a line of kind eval: not the step, nor the number of samples."""
    return {name: value for name, value in line.items() if isinstance(value, float)}


def metric_score(metrics: Mapping[str, Any] | None, best: str) -> float:
    """Larger is better: "accuracy" as it is, "-loss" negated; minus infinity where it is missing or not a number."""
    value = (metrics or {}).get(best.removeprefix("-"))
    if not isinstance(value, (int, float)) or math.isnan(value):
        return -math.inf
    return -value if best.startswith("-") else value


# what everybody wants small; scikit-learn's neg_… are large where they are good
_FALLING = re.compile(r"(?!neg_)(.*[_/.])?(loss|perplexity|bpb|error|error_rate|rmse|mse|mae)", re.IGNORECASE)


def best_word(metric: str) -> str:
    """The word that asks for the best of this metric, as checkpoint.best takes it: -loss, but accuracy."""
    return f"-{metric}" if _FALLING.fullmatch(metric) else metric


def tie_break_loss(best: str) -> str:
    """The loss of the network that a figure is of: of the weights, or of their moving average."""
    return "ema_loss" if best.removeprefix("-").startswith("ema_") else "loss"


def metric_rank(metrics: Mapping[str, Any] | None, best: str) -> tuple[float, float]:
    """What decides which of two evaluations is better, larger first: the figure, and where that is equal the loss."""
    # what has no such metric is worse than everything that has one
    first = metric_score(metrics, best)
    return first, metric_score(metrics, f"-{tie_break_loss(best)}") if first > -math.inf else first
