"""Runs of a sweep under a launcher: one after the other, each on all processes.

Every rank has a parent that stays, and starts one child a run. What a run leaves in a process (memory of a device, a
group that hangs, an aborted NCCL) goes with its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.configuration.multirun import whole_words
from trainer.configuration.search_space import Trial
from trainer.launch.child_processes import meaning
from trainer.launch.failure import STOPPED
from trainer.launch.rendezvous import Launch
from trainer.launch.status import read_status
from trainer.launch.stop_signals import StopRequest
from trainer.sweeps.results import Tried

_LOOK = 0.2  # seconds between two looks at the child and at the store
_GRACE = 30.0  # seconds that a child has after SIGTERM where its run is lost


def in_turn(trials: Sequence[Trial], tried: Tried, more: Sequence[str], launch: Launch) -> tuple[list[int], bool]:
    """Collective: one run after the other; the exit codes of those that were started, and was somebody asked to stop?

    more: words that each is given beside its own. The main rank writes down how each ended.
    """
    codes: list[int] = []
    stop = False
    with StopRequest(launch) as request:
        for trial in trials:
            if stop:  # as all ranks have heard from each other, so that none waits for another's process
                break
            if launch.is_main:
                print(f"\nrun {len(codes) + 1} of {len(trials)}   {trial.name}", flush=True)
            began = time.monotonic()
            code, stop = run_child([*whole_words(trial, tried.folder), *more], trial.number, launch, request)
            codes.append(code)
            if launch.is_main:
                tried.add(trial, code, time.monotonic() - began, _reason(code, tried.folder / trial.name))
    return codes, stop


def _reason(code: int, run: Path) -> str | None:
    """Why a run failed, in one line."""
    if code in (0, STOPPED):
        return None
    said = (read_status(run) or {}).get("reason") if code == 1 else None
    return (said or "see its message above").splitlines()[0]


def run_child(words: Sequence[str], number: int, launch: Launch, request: StopRequest) -> tuple[int, bool]:
    """Collective: every rank starts its process of the run and waits for all; what the run's exit code means.

    The second value: was anybody asked to stop, so that no further run should start?
    """
    # A launcher's processes end with 0 when they were stopped as asked: the file tells the code that was meant.
    with TemporaryDirectory(prefix="trainer-") as scratch:
        ending = Path(scratch) / "ending"
        environment = _environment(launch, number, ending)
        child = subprocess.Popen([sys.executable, "-m", "trainer", *words], env=environment)
        code = _wait(child, number, launch, request)
        if code == 0 and ending.exists():
            code = int(ending.read_text())

    # The first failing run's account goes where torchrun looks for this process's.
    if code not in (0, STOPPED) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        account = Path(environment["TORCHELASTIC_ERROR_FILE"])
        if account.is_file() and not Path(file).exists():
            shutil.copyfile(account, file)
    codes, stop = _told(code, number, launch, request.raised)
    return meaning(codes, stop), stop


def _environment(launch: Launch, number: int, ending: Path) -> dict[str, str]:
    """What torchrun would export, for one run: the same store, but keys and an error file of its own."""
    environment = {**os.environ, "TRAINER_EXIT_FILE": str(ending)}
    if not launch.address.startswith("file://"):
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = launch.address.rsplit(":", 1)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    if file != Path(os.devnull):
        # beside the other ranks' of this run: they look there for what the main rank has said
        file = file.parent.parent / f"run-{number}" / str(launch.local_rank) / file.name
        file.parent.mkdir(parents=True, exist_ok=True)
    return environment | {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "TORCHELASTIC_RUN_ID": f"{launch.run_id or 'multirun'}-{number}",
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parents' store, which outlives every run
        "TORCHELASTIC_ERROR_FILE": str(file),
    }


def _wait(child: subprocess.Popen[bytes], number: int, launch: Launch, request: StopRequest) -> int:
    """The child's exit code. A request to stop is passed on; where the run is lost the child has a while to end."""
    asked, deadline = False, float("inf")
    while True:
        try:
            return child.wait(_LOOK)
        except subprocess.TimeoutExpired:
            lost = _lost(launch, number)
            # Whatever the request was: a second SIGINT, after the terminal's own, would end the child at once.
            if (lost or request.raised) and not asked:
                child.terminate()
                asked = True
            deadline = min(deadline, time.monotonic() + _GRACE) if lost else deadline
            if time.monotonic() > deadline:
                child.kill()


def _lost(launch: Launch, number: int) -> bool:
    """Has another rank's process of this run failed, or the store gone with its launcher? Never waits."""
    store = launch.store()
    assert store is not None
    try:
        return store.check([f"run-{number}/failed"])
    except RuntimeError:
        return True


def _told(code: int, number: int, launch: Launch, asked: bool) -> tuple[list[int], bool]:
    """Collective, through the store: the exit codes of all ranks' processes, and was any rank asked to stop?"""
    store = launch.store()
    assert store is not None
    # Every rank writes [exit code, asked to stop?] under its key and waits until it can read all of them.
    keys = [f"run-{number}/rank-{rank}" for rank in range(launch.world_size)]
    try:
        if code not in (0, STOPPED):
            store.set(f"run-{number}/failed", "yes")
        store.set(keys[launch.rank], json.dumps([code, asked]))
        answers = [json.loads(answer) for answer in store.multi_get(keys)]
    except RuntimeError:  # the store went with its launcher
        return [code], True
    return [code for code, _ in answers], any(asked for _, asked in answers)
