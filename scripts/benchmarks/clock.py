"""The clock that every program reads in the same way: at the end of an optimizer step, and around the evaluation."""

from __future__ import annotations

import json
import os
import resource
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

FEW = 1000  # numbers; every network of work.py has more


class Clock:
    """Reads the time after each step of any optimizer of this process."""

    def __init__(self, steps: int) -> None:
        self._steps = steps  # that count
        self._walls: list[float] = []  # seconds, at the end of each step
        self._young = min(20, steps // 4)  # steps that do not count: caches fill, files are opened
        # of this process, all threads: hardly moves when others use the machine. Read twice: it may take 40 µs
        self._cpus: list[float] = []
        register_optimizer_step_post_hook(self._tick)

    def _tick(self, optimizer: Optimizer, *_: Any) -> None:
        # ours tries an optimizer on a few numbers before it starts: no step of the network
        if sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) > FEW:
            self._read()

    def _read(self) -> None:
        if not self._walls:
            self._first, self._first_cpu = time.time(), time.process_time()
        self._walls.append(time.perf_counter())
        if len(self._walls) in (self._young + 1, self._steps):
            self._cpus.append(time.process_time())

    @property
    def over(self) -> bool:
        """Have all steps been done?"""
        return len(self._walls) == self._steps

    def evaluate(self) -> None:
        """The evaluation begins; until then it counts from the last step."""
        self._read()

    def report(self, batches: int, accuracy: float) -> None:
        """The evaluation of so many batches is over: leave the figures, on rank 0."""
        evaluation = time.perf_counter() - self._walls[-1]
        if int(os.environ.get("RANK", "0")):
            return
        walls = self._walls[self._young : self._steps]
        figures = {
            "first": self._first - float(os.environ["BENCH_START"]),  # seconds from the command to the first step
            "first_cpu": self._first_cpu,  # seconds of the processors, all threads; other work adds less to them
            "step": 1e6 * median(after - before for before, after in pairwise(walls)),  # microseconds
            "cpu": 1e6 * (self._cpus[-1] - self._cpus[0]) / (len(walls) - 1),  # microseconds, the mean
            "evaluation": 1e6 * evaluation / batches,  # microseconds a batch
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # MiB at most
            "accuracy": accuracy,
        }
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(figures))
