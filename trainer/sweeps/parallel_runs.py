"""Runs of a sweep on this machine, one after the other or several at once, each in a process of its own.

What a run leaves in a process (memory of a device, a group that hangs, an aborted NCCL) goes with it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.configuration.multirun import Trial, run_arguments
from trainer.launch.child_processes import (
    ChildProcess,
    child_environment,
    combine_exit_codes,
    forward_signals,
    read_failure,
    start_program,
)
from trainer.launch.failure import STOPPED
from trainer.launch.run_status import read_status
from trainer.sweeps.device_shares import DeviceShare
from trainer.sweeps.results import Outcome, SweepResults
from trainer.sweeps.run_source import RunSource
from trainer.sweeps.sweep_screen import SweepScreen

_POLL_INTERVAL = 0.1  # seconds between two looks at the processes


@dataclass
class RunningChild:
    """A run under way."""

    trial: Trial
    process: ChildProcess
    share: DeviceShare  # of the machine
    began: float  # by the clock
    scratch: Path  # where it leaves why it failed


def run_concurrently(
    source: RunSource, shares: Sequence[DeviceShare], tried: SweepResults, more: Sequence[str], shown: SweepScreen
) -> int:
    """Keep one run going in each share of the machine until there are no more; how often was it asked to stop?

    more: words that each is given beside its own. A request to stop is handed on to all that are under way, and no
    other run is started; a second Ctrl-C as well, which ends them at once.
    """
    free, under_way = list(shares), list[RunningChild]()
    processes: list[ChildProcess] = []  # all that were ever started
    with (
        TemporaryDirectory(prefix="trainer-") as scratch,
        forward_signals(processes) as asked,
        _terminate_at_end(processes),
    ):
        while True:
            # every share that is free gets a run, until somebody asks to stop
            while free and not asked and (trial := source.next()) is not None:
                words, share = [*run_arguments(trial, tried.folder), *more], free.pop(0)
                child = _start_run(trial, words, share, Path(scratch) / str(trial.number), shown)
                under_way.append(child)
                processes.append(child.process)
                if asked:  # while this one was being started
                    child.process.send_signal(asked[0])
            if not under_way:
                return max(bool(asked), asked.count(signal.SIGINT))

            # what is written down at once is not lost, whatever becomes of the others
            child = _wait_for_first(under_way)
            under_way.remove(child)
            free.append(child.share)
            outcome = _record_outcome(child, bool(asked), tried)
            source.tell(child.trial, outcome)
            shown.ended(outcome)


@contextmanager
def _terminate_at_end(processes: Sequence[ChildProcess]) -> Iterator[None]:
    """After an error inside those that are under way save and stop; otherwise all have ended."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def _start_run(
    trial: Trial, words: Sequence[str], share: DeviceShare, scratch: Path, shown: SweepScreen
) -> RunningChild:
    """Start a run."""
    # its part of the machine; and how all runs end is for this process to say
    environment = child_environment(scratch) | share.environment | {"TRAINER_EXIT_FILE": ""}
    with shown.started(trial, share) as screen:
        output = None if screen is None else screen.fileno()
        process = start_program(words, environment, output, output)
    return RunningChild(trial, process, share, time.monotonic(), scratch)


def _wait_for_first(under_way: Sequence[RunningChild]) -> RunningChild:
    """Wait until one has ended."""
    while True:
        for child in under_way:
            if child.process.poll() is not None:
                return child
        time.sleep(_POLL_INTERVAL)


def _record_outcome(child: RunningChild, stopping: bool, tried: SweepResults) -> Outcome:
    """Write down how a run ended; stopping: somebody asked for it."""
    code, seconds = combine_exit_codes([child.process.wait()], stopping), time.monotonic() - child.began
    reason = None if code in (0, STOPPED) else _failure_reason(child, tried.folder / child.trial.name)
    return tried.add(child.trial, code, seconds, reason)


def _failure_reason(child: RunningChild, run: Path) -> str:
    """Why a run failed, in one line: what it has said itself, if it could."""
    if said := read_failure(child.scratch).strip():
        return said.splitlines()[0][:500]
    if (ended := child.process.wait()) < 0:
        return f"killed by {signal.Signals(-ended).name}"
    status = read_status(run) or {}
    return str(status.get("reason") or "it ended without a word").splitlines()[0]
