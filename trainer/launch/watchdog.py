"""A watch over the main thread, in a thread of its own: does the run get further, and where does it stand?

The main thread may wait in a collective that never ends, so it is not asked for anything: how far it is, it leaves
where any thread can look. Time counts only while this process runs: after a machine was asleep nobody is late.
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

from trainer.launch.rank_output import append_to_log, log_path
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import set_running_reason
from trainer.launch.stop_signals import StopRequest

_STDLIB = sysconfig.get_path("stdlib")
# Where a rank is that waits for others, or for its device: whoever hangs by itself is elsewhere.
_WAITING_FOLDERS = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/trainer/parallel/")
# threads whose stacks say nothing about the run
_OWN_THREADS = (
    "watchdog",
    "stalls",
    "stop requests",
    "what may never return",
)
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
    """The line that tells most of what a thread is doing; and does it wait there for other ranks, or for the device?

    The innermost outside Python's own library, which would say that a queue is read, and not whose.
    """
    frame = sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame) if frame is not None else []
    told = [line for line in lines if not line.filename.startswith((_STDLIB, "<")) or "-packages" in line.filename]
    if not told:
        return "nothing of Python", False
    last = told[-1]
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


INTERVAL = 1.0  # seconds between two looks
STOP_TIMEOUT = 10.0  # seconds in which a run that was asked to stop should get further
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is, and how long it may take to get further."""

    step: int  # that is under way, or was done last
    laps: int  # phases of steps, and batches of evaluations, that were done
    patience: float  # seconds, here in the run
    worry: float  # seconds after which a rank that waits asks the others, wherever it is in the run


class IdleTimer:
    """For how long nothing has gone on, in time that this process has lived through."""

    def __init__(self) -> None:
        self._laps, self._since, self.seconds = -1, monotonic(), 0.0

    def look(self, laps: int) -> float:
        """So many seconds."""
        now = monotonic()
        # between two looks of a process that runs lies one pause; more is the sleep of a machine, or of the process
        lived, self._since = min(now - self._since, 2 * INTERVAL), now
        self.seconds = self.seconds + lived if laps == self._laps else 0.0
        self._laps = laps
        return self.seconds


class Watchdog:
    """Watches over a process alone. It says where that stands and ends nothing: nobody else waits for it."""

    def __init__(self, launch: Launch, folder: Path, stop: StopRequest, pulse: Callable[[], RankProgress]) -> None:
        self._launch, self._folder, self._stop, self._pulse = launch, folder, stop, pulse

    def __enter__(self) -> Self:
        self._over, self._main = threading.Event(), threading.get_ident()
        self._threads = [threading.Thread(target=act, name="watchdog", daemon=True) for act in self._acts()]
        for thread in self._threads:
            thread.start()
        return self

    def _acts(self) -> list[Callable[[], None]]:
        return [self._watch]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """From here on the main thread speaks for itself, of an error too."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * INTERVAL)  # not for ever: it may ask a store that no longer answers

    def _watch(self) -> None:
        idle, asked, times = IdleTimer(), IdleTimer(), 0
        answered = False  # was it said that a request to stop is not heard?
        while not self._over.wait(INTERVAL):
            pulse = self._pulse()
            seconds = idle.look(pulse.laps)
            times = times if seconds else 0
            # a person at a debugger is no hang
            if seconds > self._due(pulse, times) and not is_in_debugger(self._main):
                times += 1
                self._late(pulse, seconds)
            if self._stop.raised and not answered and asked.look(pulse.laps) > STOP_TIMEOUT:
                answered = True
                self._asked_in_vain()

    def _due(self, pulse: RankProgress, times: int) -> float:
        """After how many seconds something is to be said, when it was so many times."""
        return pulse.patience * (times + 1)

    def _late(self, pulse: RankProgress, seconds: float) -> None:
        where = self._where(f"nothing has gone on for {seconds:.0f} s")
        log.warning("nothing has gone on for %.0f s; the run waits on, at %s", seconds, where)

    def _asked_in_vain(self) -> None:
        self._not_further(self._where(self._stop.reason), self._launch.rank)

    def _where(self, occasion: str) -> str:
        """Leave the stacks of all threads in the log; the main thread's line, and where the rest stands."""
        append_to_log(f"{occasion}; the threads are here:\n{format_stacks()}", self._folder, self._launch.rank)
        return f"{current_line(self._main)[0]} (all threads: {log_path(self._folder, self._launch.rank)})"

    def _not_further(self, what: str, rank: int | None) -> None:
        """Whoever asked it to stop may kill it any moment: until it gets further, its last word says why it did not."""
        with suppress(OSError):
            set_running_reason(self._folder, f"{self._stop.reason}, and nothing has gone on since: {what}", rank)
