"""A thread that watches the main thread: does the run get further, and which line is it at?

The main thread may wait in a collective that never ends, so it is not asked for anything: it leaves its progress where
any thread can read it. Time counts only while this process runs: after a machine was asleep nobody is late.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

from trainer.launch.flight_recorder import save_collectives
from trainer.launch.rank_output import append_to_log, log_path
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import set_running_reason
from trainer.launch.stop_signals import StopRequest

INTERVAL = 1.0  # seconds between two looks
STOP_TIMEOUT = 10.0  # seconds in which a run that was asked to stop should get further
log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------- where threads are

_STDLIB = sysconfig.get_path("stdlib")
# Where a rank is that waits for others, or for its device: a rank that hangs by itself is elsewhere.
_WAITING_FOLDERS = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/trainer/parallel/")
# threads whose stacks say nothing about the run
_OWN_THREADS = ("watchdog", "stalls", "stop requests", "what may never return")
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy")


def format_stacks() -> str:
    """The stacks of all threads but the framework's own, innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if names.get(ident) not in _OWN_THREADS
    )


def current_line(thread: int) -> tuple[str, bool]:
    """The line that says most about what a thread does; and does it wait there for other ranks, or for the device?

    It is the innermost line outside Python's own library, which would say that a queue is read, and not whose.
    """
    frame = sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame) if frame is not None else []
    telling = [line for line in lines if not line.filename.startswith((_STDLIB, "<")) or "-packages" in line.filename]
    if not telling:
        return "nothing of Python", False
    last = telling[-1]
    waits = any(folder in last.filename for folder in _WAITING_FOLDERS)
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}".rstrip(": "), waits


def is_in_debugger(thread: int) -> bool:
    """Does the thread stand in a debugger, and wait for a person?"""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


# ------------------------------------------------------------------------------------------------------------ the watch


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is, and how long it may take to get further."""

    step: int  # that is under way, or was done last
    phases: int  # of steps, and batches of evaluations, that were done
    timeout: float  # seconds, for what the run is doing now
    ask_after: float  # seconds after which a rank that waits asks the others, whatever the run is doing


class IdleTimer:
    """For how long a rank has got no further, in time in which this process was running."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._phases, self._clock, self._looked_at, self.seconds = -1, clock, clock(), 0.0

    def update(self, phases: int) -> float:
        """The seconds since the number of phases has changed."""
        now = self._clock()
        # between two looks of a process that runs lies one interval; more is the sleep of a machine, or of the process
        running, self._looked_at = min(now - self._looked_at, 2 * INTERVAL), now
        self.seconds = self.seconds + running if phases == self._phases else 0.0
        self._phases = phases
        return self.seconds


class Watchdog:
    """Watches the only rank of a run. It reports where that stands and ends nothing: nobody else waits for it."""

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        stop: StopRequest,
        progress: Callable[[], RankProgress],
        interval: float = INTERVAL,
        stop_timeout: float = STOP_TIMEOUT,
    ) -> None:
        self._launch, self._folder, self._stop, self._progress = launch, folder, stop, progress
        self._interval, self._stop_timeout = interval, stop_timeout

    def __enter__(self) -> Self:
        self._over, self._main_thread = threading.Event(), threading.get_ident()
        self._threads = [threading.Thread(target=loop, name="watchdog", daemon=True) for loop in self._loops()]
        for thread in self._threads:
            thread.start()
        return self

    def _loops(self) -> list[Callable[[], None]]:
        """What runs until the end, each in a thread of its own."""
        return [self._watch]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """From here on the main thread reports by itself, errors too."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * INTERVAL)  # not for ever: it may ask a store that no longer answers

    def _watch(self) -> None:
        idle, idle_since_stop, reports = IdleTimer(), IdleTimer(), 0
        stop_reported = False
        while not self._over.wait(self._interval):
            progress = self._progress()
            seconds = idle.update(progress.phases)
            reports = reports if seconds else 0
            # a person at a debugger is no hang
            if seconds > self._report_after(progress, reports) and not is_in_debugger(self._main_thread):
                reports += 1
                self._report_idle(progress, seconds)
            if self._stop.raised and not stop_reported and idle_since_stop.update(progress.phases) > self._stop_timeout:
                stop_reported = True
                self._report_ignored_stop()

    def _report_after(self, progress: RankProgress, reports: int) -> float:
        """After how many seconds the next report is due, when there were so many already."""
        return progress.timeout * (reports + 1)

    def _report_idle(self, progress: RankProgress, seconds: float) -> None:
        where = self._log_stacks(f"nothing has gone on for {seconds:.0f} s")
        log.warning("nothing has gone on for %.0f s; the run waits on, at %s", seconds, where)

    def _report_ignored_stop(self) -> None:
        self._write_reason(self._log_stacks(self._stop.reason), self._launch.rank)

    def _log_stacks(self, occasion: str) -> str:
        """Write the stacks of all threads into the log, the last collectives beside it; the main thread's line."""
        text = f"{occasion}; the threads are here:\n{format_stacks()}"
        append_to_log(text, self._folder, self._launch.rank)
        with suppress(OSError):  # a full disk
            save_collectives(self._folder, self._launch.rank)
        return f"{current_line(self._main_thread)[0]} (all threads: {log_path(self._folder, self._launch.rank)})"

    def _write_reason(self, what: str, rank: int | None) -> None:
        """Say in status.json why the run does not stop: whoever asked it to may kill it any moment."""
        with suppress(OSError):
            reason = f"{self._stop.reason}, and nothing has gone on since: {what}"
            set_running_reason(self._folder, reason, rank)
