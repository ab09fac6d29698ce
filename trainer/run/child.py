"""One run of several: a process on every rank, started and watched by that rank's parent, which is its launcher.

What a run leaves in a process - memory of a device, a group that hangs, an aborted NCCL - goes with its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from trainer.launch.launch import Launch
from trainer.launch.signals import REQUESTS

STOPPED = 75  # as of a single run
_LOOK = 0.2  # seconds between two looks at the child and at the store
_GRACE = 30.0  # seconds that a child has to save after SIGTERM


class Requests:
    """Passes SIGTERM, SIGINT and SIGUSR1 on to the child, and remembers that one came; a context."""

    def __init__(self) -> None:
        self.stop = False  # should no further job start?
        self._child: subprocess.Popen[bytes] | None = None
        self._launcher = os.getppid()

    def __enter__(self) -> Requests:
        """Listen from now on."""
        self._before = {number: signal.signal(number, self._handle) for number in REQUESTS}
        return self

    def __exit__(self, *_: Any) -> None:
        """Put the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, child: subprocess.Popen[bytes] | None) -> None:
        """From now on this is the child."""
        self._child = child
        if child is not None and self.stop:  # the signal came while it was started
            child.terminate()

    def orphaned(self, launch: Launch) -> bool:
        """Is the launcher gone? A killed one signals nobody."""
        return launch.restarts and os.getppid() != self._launcher

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        if self._child is not None:
            self._child.send_signal(number)


def run_child(words: Sequence[str], number: int, launch: Launch, requests: Requests) -> int:
    """Collective: every rank starts its process of the job and waits for all; the exit code that the job means."""
    with TemporaryDirectory(prefix="trainer-job-") as scratch:
        ending = Path(scratch) / "ending"
        environment = _environment(launch, number, ending)
        child = subprocess.Popen([sys.executable, "-m", "trainer", *words], env=environment)
        requests.watch(child)
        code = _wait(child, lambda: requests.orphaned(launch) or _failed(launch, number))
        requests.watch(None)
        if code == 0 and ending.exists():  # processes of a launcher end with 0 when they were stopped as asked
            code = int(ending.read_text())
    if code not in (0, STOPPED) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) and launch.address:
        _keep_error(Path(environment["TORCHELASTIC_ERROR_FILE"]), Path(file))
    codes = _told(code, number, launch, requests)
    return meaning(codes, requests.stop)


def meaning(codes: list[int], stop: bool) -> int:
    """The exit code of a job from those of its ranks."""
    bad = [code for code in codes if code not in (0, STOPPED)]
    if not bad:
        return codes[0]  # the main rank knows whether it was stopped
    if stop and all(-code in REQUESTS for code in bad):
        return STOPPED  # before there was anything to save
    return 2 if 2 in bad else 1


def _environment(launch: Launch, number: int, ending: Path) -> dict[str, str]:
    """What torchrun would export, for one job: the same store, but keys and an error file of its own."""
    environment = {**os.environ, "TRAINER_EXIT_FILE": str(ending)}
    if not launch.address:
        return environment
    if not launch.address.startswith("file://"):
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = launch.address.rsplit(":", 1)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    if file != Path(os.devnull):
        # beside the other ranks' of this job: they look there for what the main rank has said
        file = file.parent.parent / f"job-{number}" / str(launch.local_rank) / file.name
        file.parent.mkdir(parents=True, exist_ok=True)
    return environment | {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "TORCHELASTIC_RUN_ID": f"{launch.run_id or 'multirun'}-{number}",
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parents' store, which outlives every job
        "TORCHELASTIC_ERROR_FILE": str(file),
    }


def _wait(child: subprocess.Popen[bytes], hopeless: Callable[[], bool]) -> int:
    """The child's exit code; once it is hopeless, it is asked to end and given a while, as a launcher does."""
    deadline = None
    while True:
        try:
            return child.wait(_LOOK)
        except subprocess.TimeoutExpired:
            if deadline is None and hopeless():
                child.terminate()
                deadline = time.monotonic() + _GRACE
            elif deadline is not None and time.monotonic() > deadline:
                child.kill()


def _failed(launch: Launch, number: int) -> bool:
    """Has another rank's process of this job failed, or the store gone with its launcher? Never waits."""
    store = launch.store()
    try:
        return store is not None and store.check([f"job-{number}/failed"])
    except RuntimeError:
        return True


def _told(code: int, number: int, launch: Launch, requests: Requests) -> list[int]:
    """Collective, through the store: the exit codes of all ranks' processes; whoever was asked to stop stops all."""
    store = launch.store()
    if store is None:
        return [code]
    keys = [f"job-{number}/rank-{rank}" for rank in range(launch.world_size)]
    try:
        if code not in (0, STOPPED):
            store.set(f"job-{number}/failed", "yes")
        store.set(keys[launch.rank], json.dumps([code, requests.stop]))
        while not store.check(keys):
            time.sleep(_LOOK)
        answers = [json.loads(store.get(key)) for key in keys]
    except RuntimeError:  # the store went with its launcher
        requests.stop = True
        return [code]
    requests.stop = any(stop for _, stop in answers)
    return [code for code, _ in answers]


def _keep_error(child_s: Path, own: Path) -> None:
    """Leave the first failing job's account where torchrun looks for this process's."""
    if child_s.is_file() and not own.exists():
        shutil.copyfile(child_s, own)
