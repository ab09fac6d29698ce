"""Runs of a sweep on this machine, one after the other or several at once, each in a process of its own.

What a run leaves in a process (memory of a device, a group that hangs, an aborted NCCL) goes with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.configuration.multirun import whole_words
from trainer.configuration.search_space import Trial
from trainer.launch.child_processes import account, handed_on, meaning
from trainer.launch.failure import STOPPED
from trainer.launch.status import read_status
from trainer.sweeps.device_shares import Share
from trainer.sweeps.results import Outcome, SweepResults
from trainer.sweeps.run_source import Source
from trainer.sweeps.sweep_screen import Shown

_LOOK = 0.1  # seconds between two looks at the processes


@dataclass
class Child:
    """A run under way."""

    trial: Trial
    process: subprocess.Popen[bytes]
    share: Share  # of the machine
    began: float  # by the clock
    scratch: Path  # where it leaves why it failed


def run_concurrently(
    source: Source, shares: Sequence[Share], tried: SweepResults, more: Sequence[str], shown: Shown
) -> int:
    """Keep one run going in each share of the machine until there are no more; how often was it asked to stop?

    more: words that each is given beside its own. A request to stop is handed on to all that are under way, and no
    other run is started; a second Ctrl-C as well, which ends them at once.
    """
    free, under_way = list(shares), list[Child]()
    processes: list[subprocess.Popen[bytes]] = []  # all that were ever started
    with TemporaryDirectory(prefix="trainer-") as scratch, handed_on(processes) as asked, _none_left(processes):
        while True:
            # every share that is free gets a run, until somebody asks to stop
            while free and not asked and (trial := source.next()) is not None:
                words, share = [*whole_words(trial, tried.folder), *more], free.pop(0)
                child = _started(trial, words, share, Path(scratch) / str(trial.number), shown)
                under_way.append(child)
                processes.append(child.process)
                if asked:  # while this one was being started
                    child.process.send_signal(asked[0])
            if not under_way:
                return max(bool(asked), asked.count(signal.SIGINT))

            # what is written down at once is not lost, whatever becomes of the others
            child = _first_to_end(under_way)
            under_way.remove(child)
            free.append(child.share)
            outcome = _noted(child, bool(asked), tried)
            source.tell(child.trial, outcome)
            shown.ended(outcome)


@contextmanager
def _none_left(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """After an error inside those that are under way save and stop; otherwise all have ended."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def _started(trial: Trial, words: Sequence[str], share: Share, scratch: Path, shown: Shown) -> Child:
    """Start a run."""
    (scratch / "0").mkdir(parents=True)
    command = [sys.executable, "-m", "trainer", *words]
    with shown.started(trial, share) as screen:
        # in a session of its own: a terminal's Ctrl-C comes here alone, and is handed on
        process = subprocess.Popen(
            command,
            env=_environment(share.environment, scratch),
            stdin=screen and subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
    return Child(trial, process, share, time.monotonic(), scratch)


def _environment(own: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """That of this process, a run's part of the machine, and where it says what only this process wants to know."""
    return {
        **os.environ,
        **own,
        "TRAINER_PARENT": str(os.getpid()),  # once this process is gone, killed perhaps, the run stops
        "TRAINER_EXIT_FILE": "",  # how all of them end is for this one to say
        "TORCHELASTIC_ERROR_FILE": str(scratch / "0" / "error.json"),
    }


def _first_to_end(under_way: Sequence[Child]) -> Child:
    """Wait until one has ended."""
    while True:
        for child in under_way:
            if child.process.poll() is not None:
                return child
        time.sleep(_LOOK)


def _noted(child: Child, stopping: bool, tried: SweepResults) -> Outcome:
    """Write down how a run ended; stopping: somebody asked for it."""
    code, seconds = meaning([child.process.wait()], stopping), time.monotonic() - child.began
    reason = None if code in (0, STOPPED) else _reason(child, tried.folder / child.trial.name)
    return tried.add(child.trial, code, seconds, reason)


def _reason(child: Child, run: Path) -> str:
    """Why a run failed, in one line: what it has said itself, if it could."""
    if said := account(child.scratch).strip():
        return said.splitlines()[0][:500]
    if (ended := child.process.returncode) < 0:
        return f"killed by {signal.Signals(-ended).name}"
    status = read_status(run) or {}
    return str(status.get("reason") or "it ended without a word").splitlines()[0]
