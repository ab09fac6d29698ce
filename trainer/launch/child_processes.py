"""Several processes of one run on this machine (`processes=N`), and their restarts after a failure.

They meet at a store in a file: a store at a port asks nobody for a password, so other users of the machine could read
and change it. Who started them waits, hands on requests to stop, and ends with the run's own exit code. Nothing here
needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict

from trainer.launch.failure import STOPPED
from trainer.launch.rank_output import OutputRelay, say
from trainer.launch.run_status import read_status
from trainer.launch.stop_signals import STOP_SIGNALS
from trainer.launch.validation import DamagedFile, Whole, read_json
from trainer.messages import format_count

_POLL_INTERVAL = 0.1  # seconds between two looks at the processes
_NOTICE_TIMEOUT = 10.0  # seconds that the others have to notice that one has failed, and to say so
_KILL_TIMEOUT = 20.0  # seconds more until those are killed that did not end when they were asked to


class ChildProcess(Protocol):
    """A process that was started, with the verbs of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code; None: it has not ended."""

    def wait(self) -> int:
        """The exit code, once there is one."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal to it, unless it has ended."""

    def terminate(self) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """End it now."""


# Starts the words in an environment; what the process prints goes to two descriptors (None: to those of this process).
ProcessStarter = Callable[[Sequence[str], Mapping[str, str], int | None, int | None], ChildProcess]


def trainer_command(words: Sequence[str]) -> list[str]:
    """The program that runs the words, as this process runs its own."""
    return [sys.executable, "-m", "trainer", *words]


def start_program(
    words: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> ChildProcess:
    """A process that is a program of its own, and imports what it needs by itself."""
    return subprocess.Popen(
        trainer_command(words),
        env=environment,
        # who has its words in a file is not at the terminal, and must not read from it either
        stdin=None if stdout is None else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is handed on once
    )


# Runs the words in an environment and waits; the exit code, and all that was printed.
ProgramRunner = Callable[[Sequence[str], Mapping[str, str]], tuple[int, str]]


def run_program(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run the words in a process of its own and wait for it; the exit code, and all that was printed."""
    ended = subprocess.run(
        trainer_command(words),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return ended.returncode, ended.stdout


def run_ranks(
    words: Sequence[str], count: int, scratch: Path, attempt: int = 0, starter: ProcessStarter = start_program
) -> tuple[int, list[int]]:
    """Run the words in so many processes and wait for all; the run's exit code, and which signals asked it to stop.

    scratch: an empty folder that other users may not look into; where a rank is refused or fails its account is then in
    `<rank>/error.json`. attempt: how often the same words have been started before.
    """
    children: list[ChildProcess] = []
    with OutputRelay() as relay, forward_signals(children) as asked:
        try:
            for rank in range(count):
                environment = _rank_environment(rank, count, scratch) | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
                children.append(starter(words, environment, relay.stdout, relay.stderr))
            code = combine_exit_codes(_wait_for_all(children, relay, asked), bool(asked))
        finally:
            for child in children:
                child.kill()  # does nothing to those that have ended
    # a sweep that has started this command looks for the account where launchers do
    if (first := _first_error_file(scratch)) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        shutil.copyfile(first, file)
    return code, asked


def combine_exit_codes(codes: Sequence[int], stop: bool) -> int:
    """The exit code of a run from those of its processes; stop: somebody asked it to stop."""
    bad = [code for code in codes if code not in (0, STOPPED)]
    if not bad:
        return codes[0]  # the main rank knows whether it was stopped
    if stop and all(-code in STOP_SIGNALS for code in bad):
        return STOPPED  # before there was anything to save
    return 2 if 2 in bad else 1


def read_failure(scratch: Path) -> str:
    """What the rank that failed first has left about it; empty where none has."""
    first = _first_error_file(scratch)
    return json.loads(first.read_text(encoding="utf-8"))["message"]["message"] if first else ""


def _first_error_file(scratch: Path) -> Path | None:
    def when(path: Path) -> int:
        return int(json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]["timestamp"])

    return min(scratch.glob("*/error.json"), key=when, default=None)


def _rank_environment(rank: int, count: int, scratch: Path) -> dict[str, str]:
    """What torchrun would export for this rank, with a file in the place of its store."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        "OMP_NUM_THREADS": str(threads),  # more threads than cores wait for each other
        **_loopback_interfaces(),
        **child_environment(scratch, rank),
        # what can be imported here can be imported there, wherever it lies; mp.spawn does as much
        "PYTHONPATH": os.pathsep.join(str(path) for path in sys.path if path),
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TRAINER_STORE": str(scratch / "store"),
    }


def child_environment(scratch: Path, rank: int = 0) -> dict[str, str]:
    """That of this process; and a child learns who its parent is, and where it leaves an account of its failure."""
    file = scratch / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    # once the parent is gone, killed perhaps, the child stops
    return {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file), "TRAINER_PARENT": str(os.getpid())}


def _loopback_interfaces() -> dict[str, str]:
    """Let gloo and NCCL listen where no other machine gets in; they would take the interface of the host's name."""
    own = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    # the sign: no other name that begins like this one
    return {"GLOO_SOCKET_IFNAME": own[0], "NCCL_SOCKET_IFNAME": f"={own[0]}"} if own else {}


@contextmanager
def forward_signals(children: Sequence[ChildProcess]) -> Iterator[list[int]]:
    """Inside, requests to stop go to all children, and into the list; only the main thread can hear them."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_all(children: Sequence[ChildProcess], relay: OutputRelay, requests: list[int]) -> list[int]:
    """The exit codes of all; where one has failed the others have a while to notice it by themselves."""
    failed, asked = None, False
    # a sweep that is killed tells nobody: its runs stop, so that the next sweep finds their folders free
    parent = os.getppid() if os.environ.get("TRAINER_PARENT") == str(os.getppid()) else None
    while any(child.poll() is None for child in children):
        if parent not in (None, os.getppid()):
            parent = None
            requests.append(signal.SIGTERM)
            for child in children:
                child.terminate()
        if failed is None and any(child.poll() not in (None, 0, STOPPED) for child in children):
            failed = time.monotonic()
            for child in children:  # one that was stopped (SIGSTOP) must run to hear that the run is over
                child.send_signal(signal.SIGCONT)
        late = time.monotonic() - failed if failed is not None else 0.0
        if late > _NOTICE_TIMEOUT and not asked:
            asked = True
            for child in children:
                child.terminate()
        if late > _NOTICE_TIMEOUT + _KILL_TIMEOUT:
            for child in children:
                child.kill()
        relay.pass_on(_POLL_INTERVAL)
    return [child.wait() for child in children]


_FINAL_CODES = (0, STOPPED, 2)  # a refusal would be the same the next time


class FailedAttempt(NamedTuple):
    """How a try ended. One that is the same twice is no accident."""

    step: int  # the last one that was reported
    saved: int  # the newest checkpoint; -1: none
    reason: str


def run_with_restarts(
    words: Sequence[str], count: int, scratch: Path, folder: Path, restarts: int, starter: ProcessStarter
) -> tuple[int, list[int], str]:
    """Run the words in so many processes, again after a failure, up to `restarts` times without a new checkpoint.

    The exit code of the last try, which signals asked it to stop, and its account of what went wrong; scratch: an empty
    folder; folder: of the run.
    """
    left, faults = restarts, list[FailedAttempt]()
    while True:
        place = scratch / f"attempt_{len(faults)}"
        place.mkdir()
        code, asked = run_ranks(words, count, place, len(faults), starter)
        said = read_failure(place)
        if not restarts or code in _FINAL_CODES or asked:
            return code, asked, said
        faults.append(describe_attempt(folder, said))
        *earlier, last = faults
        # what has been saved since is progress, however long it took
        if earlier and last.saved > earlier[-1].saved:
            left = restarts
        if earlier and last == earlier[-1]:
            say(f"no restart  the same failure twice at step {last.step:,}: {last.reason}")
            return code, asked, said
        if not left:
            say(f"no restart  {format_count(restarts, 'restart')} without a new checkpoint (distributed.restarts)")
            return code, asked, said
        left -= 1
        where = f"from step {last.saved:,}" if last.saved >= 0 else "from the beginning"
        say(f"restart     {where}, after a failure at step {last.step:,}: {last.reason}; left without progress: {left}")


def describe_attempt(folder: Path, said: str) -> FailedAttempt:
    """How the last try ended, by the run's files and by what its processes have left."""
    status = read_status(folder) or {}
    return FailedAttempt(
        status.get("step", 0),
        _newest_checkpoint_step(folder),
        next(iter(said.splitlines()), "killed, without a last word"),
    )


class _SavedStep(TypedDict):
    """What is read here of a manifest.json."""

    step: Whole


def _newest_checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    steps = [-1]
    for path in (folder / "checkpoints").glob("[!.]*/manifest.json"):
        with suppress(OSError, DamagedFile):  # removed just now; of no use to the next try either
            steps.append(read_json(path, _SavedStep)[0]["step"])
    return max(steps)
