"""Traces of chosen steps by torch.profiler, one file a rank; and the neutral element that traces nothing."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from trainer.launch.safe_files import make_folder
from trainer.messages import Refusal


class NoProfiler:
    """No step is traced, and nothing is paid for it."""

    def step(self) -> None:
        """A step has been done."""

    def close(self) -> list[str]:
        """The run is over; lines that say where the traces are."""
        return []


class StepProfiler(NoProfiler):
    """One trace of the steps `first` to `last`, counted from 1 at this start; the step before warms the profiler up."""

    def __init__(self, first: int, last: int, path: Path, device: torch.device) -> None:
        self._first, self._path, self._written = first, path, False
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler calls a GPU that is not there an error
        activities = {ProfilerActivity.CPU} if device.type == "cpu" else supported_activities()
        # the profiler's first step is slow and full of its own work: the one before the window takes that
        window = schedule(wait=first - 2, warmup=1, active=last - first + 1, repeat=1)
        self._profiler = profile(
            activities=activities, schedule=window, on_trace_ready=self._write, record_shapes=True, acc_events=True
        )
        # from here on each step costs a little, also those that only count towards the window
        self._profiler.start()

    def step(self) -> None:
        """A step has been done."""
        self._profiler.step()

    def close(self) -> list[str]:
        """The run is over, perhaps in the middle of the window; lines that say where the traces are."""
        self._profiler.stop()
        # the window of steps was never completed
        if not self._written:
            return [f"profile     nothing traced: this start ended before its step {self._first}"]
        return [f"profile     {self._path.parent}: a trace of each rank, for https://ui.perfetto.dev"]

    def _write(self, profiler: profile) -> None:
        # torch would write through a link that stands there
        draft = make_folder(self._path.parent) / f".{secrets.token_hex(4)}-{self._path.name}"
        profiler.export_chrome_trace(str(draft))
        draft.replace(self._path)
        self._written = True


def refuse_profile_window(window: tuple[int, int] | None, steps: int) -> None:
    """Refuse steps to trace that the run will not reach."""
    if window is not None and window[1] > steps:
        nearest = f"; profile=[2,{min(4, steps)}] would fit" if steps > 1 else ""
        raise Refusal(f"profile: steps {window[0]} to {window[1]} are to be traced, but the run has {steps}{nearest}")
