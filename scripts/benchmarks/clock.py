"""The clock that every program reads in the same way: at the end of an optimizer step, and around the evaluation."""

from __future__ import annotations

import json
import os
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class Clock:
    """Reads the time after each step of any optimizer of this process."""

    def __init__(self) -> None:
        self._ends: list[float] = []  # seconds, of the wall
        self._cpu: list[float] = []  # seconds of this process, all threads: hardly moves when others use the machine
        register_optimizer_step_post_hook(self._tick)

    def _tick(self, *_: Any) -> None:
        if not self._ends:
            self._first = time.time()
        self._ends.append(time.perf_counter())
        self._cpu.append(time.process_time())

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self._ends)

    def evaluate(self) -> None:
        """The evaluation begins; until then it counts from the last step."""
        self._ends.append(time.perf_counter())
        self._cpu.append(time.process_time())

    def report(self, steps: int, batches: int, accuracy: float) -> None:
        """The evaluation of so many batches is over: leave the figures of these steps, on rank 0."""
        evaluation = time.perf_counter() - self._ends[-1]
        if int(os.environ.get("RANK", "0")):
            return
        young = min(20, steps // 4)  # steps that do not count: caches fill, files are opened
        ends, cpu = self._ends[young:steps], self._cpu[young:steps]
        gaps = sorted(after - before for before, after in pairwise(ends))
        figures = {
            "first": self._first - float(os.environ["BENCH_START"]),  # seconds from the command to the first step
            "step": 1e6 * gaps[len(gaps) // 2],  # microseconds, the median
            "cpu": 1e6 * (cpu[-1] - cpu[0]) / len(gaps),  # microseconds, the mean
            "evaluation": 1e6 * evaluation / batches,  # microseconds a batch
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # MiB at most
            "accuracy": accuracy,
        }
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(figures))
