"""The ranks of one run on this machine (`processes=N`), as torchrun would start them, and restarts after a failure.

They meet at a store in a file: a store at a port asks nobody for a password, so other users of the machine could read
and change it. The process that started them waits, forwards requests to stop, and ends with the run's own exit code.
Nothing here needs torch.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import Popen
from typing import NamedTuple, Self, TextIO, TypedDict

from trainer.launch.child_processes import child_environment, forward_signals, import_path, start_program
from trainer.launch.failure import STOPPED
from trainer.launch.rank_output import say
from trainer.launch.run_status import read_status
from trainer.launch.stop_signals import STOP_SIGNALS
from trainer.launch.typed_values import DamagedFile, Whole, read_json
from trainer.messages import Refusal, format_count

_POLL_INTERVAL = 0.1  # seconds
_NOTICE_TIMEOUT = 10.0  # seconds that the others have to notice that one has failed, and to report it
_KILL_TIMEOUT = 20.0  # seconds more until those are killed that did not end when they were asked to
_FINAL_CODES = (0, STOPPED, 2)  # no restart: a refusal would be the same the next time


class FailedAttempt(NamedTuple):
    """How an attempt ended. Two equal ones are no accident: a third would end the same way."""

    step: int  # the last one that was reported
    saved: int  # the newest checkpoint; -1: none
    reason: str


# Host memory that each rank has for itself at least: 443 and 449 MB were measured of two ranks of a small network.
PROCESS_BYTES = 4e8


def refuse_too_many(count: int) -> None:
    """Refuse more processes than the memory of this machine bears, before the first of them starts."""
    if count <= (os.cpu_count() or 1):
        return  # no machine is that small, and what follows imports torch
    from trainer.launch.devices import available_host_memory

    available = available_host_memory()
    if count * PROCESS_BYTES > available:
        each, most = PROCESS_BYTES / 1e9, max(1, int(available / PROCESS_BYTES))
        raise Refusal(
            f"processes={count}: a process takes {each:g} GB at least, {count * each:,.1f} GB in all, and"
            f" {available / 1e9:.1f} GB are free; at most processes={most}"
        )


def run_with_restarts(
    arguments: Sequence[str],
    count: int,
    scratch: Path,
    folder: Path,
    restarts: int,
    run: Callable[[Sequence[str], int, Path, int], tuple[int, list[int]]] | None = None,
) -> tuple[int, list[int], str]:
    """Run in so many processes, again after a failure, up to `restarts` times without a new checkpoint.

    The exit code of the last attempt, the signals that asked it to stop, and its message about what went wrong.
    scratch: an empty folder; folder: of the run. run: what an attempt is, `run_ranks`.
    """
    restarts_left, failures = restarts, list[FailedAttempt]()
    while True:
        # each attempt has a folder of its own: the store of the last one is still full of its keys
        attempt_folder = scratch / f"attempt_{len(failures)}"
        attempt_folder.mkdir()
        code, signals = (run or run_ranks)(arguments, count, attempt_folder, len(failures))
        message = read_failure(attempt_folder)
        if not restarts or code in _FINAL_CODES or signals:
            return code, signals, message
        failures.append(describe_attempt(folder, message))
        *earlier, last = failures
        # what has been saved since is progress, however long it took
        if earlier and last.saved > earlier[-1].saved:
            restarts_left = restarts
        if earlier and last == earlier[-1]:
            say(f"no restart  the same failure twice at step {last.step:,}: {last.reason}")
            return code, signals, message
        if not restarts_left:
            say(f"no restart  {format_count(restarts, 'restart')} without a new checkpoint (distributed.restarts)")
            return code, signals, message
        restarts_left -= 1
        where = f"from step {last.saved:,}" if last.saved >= 0 else "from the beginning"
        failed = f"after a failure at step {last.step:,}: {last.reason}"
        say(f"restart     {where}, {failed}; left without progress: {restarts_left}")


def run_ranks(
    arguments: Sequence[str],
    count: int,
    scratch: Path,
    attempt: int,
    start: Callable[..., Popen[bytes]] = start_program,
) -> tuple[int, list[int]]:
    """Start so many ranks and wait for all; the run's exit code, and the signals that asked it to stop.

    scratch: an empty folder that other users may not look into; where a rank is refused or fails, it reports that in
    `<rank>/error.json`. attempt: how often the same run has been started before.
    """
    children: list[Popen[bytes]] = []
    with OutputRelay() as relay:
        try:
            with forward_signals(children) as signals:
                for rank in range(count):
                    environment = _rank_environment(rank, count, scratch) | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
                    # Python would answer a Ctrl-C with a traceback while it starts: a rank hears of it in main()
                    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                    try:
                        children.append(start(arguments, environment, relay.stdout, relay.stderr))
                    finally:
                        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                # one that came meanwhile did not reach all; there is no run yet
                codes = [-signals[0]] if signals else _wait_for_all(children, relay, signals)
        finally:
            for child in children:
                child.kill()  # does nothing to those that have ended
                child.wait()
    code = combine_exit_codes(codes, bool(signals))
    if code == STOPPED and min(codes) < 0:
        say("interrupted before the run began")
    # a sweep that has started this command looks for the report where launchers do
    if (first := _first_error_file(scratch)) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        shutil.copyfile(first, file)
    return code, signals


def combine_exit_codes(codes: Sequence[int], stop: bool) -> int:
    """The exit code of a run from those of its processes; stop: somebody asked it to stop."""
    bad = [code for code in codes if code not in (0, STOPPED)]
    if not bad:
        return codes[0]  # the main rank knows whether it was stopped
    ended_by = {-code for code in bad}
    if stop and ended_by.intersection(STOP_SIGNALS) and ended_by <= {*STOP_SIGNALS, signal.SIGKILL}:
        return STOPPED  # before there was anything to save
    return 2 if 2 in bad else 1


def _rank_environment(rank: int, count: int, scratch: Path) -> dict[str, str]:
    """What torchrun would export for this rank, with a file in the place of its store."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        "OMP_NUM_THREADS": str(threads),  # more threads than cores wait for each other
        **_loopback_interfaces(),
        **child_environment(scratch, rank),
        # what can be imported here can be imported there, wherever it lies; mp.spawn does as much
        "PYTHONPATH": import_path(),
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TRAINER_STORE": str(scratch / "store"),
    }


def _loopback_interfaces() -> dict[str, str]:
    """Let gloo and NCCL listen where no other machine gets in; they would take the interface of the host's name."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    # the sign =: no other name that begins like this one
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"} if loopback else {}


def _wait_for_all(children: Sequence[Popen[bytes]], relay: OutputRelay, signals: list[int]) -> list[int]:
    """The exit codes of all; where one has failed the others have a while to notice it by themselves."""

    def send(number: int) -> None:
        for child in children:
            child.send_signal(number)

    failed_at, terminated, own = None, False, list[int]()
    # a sweep that is killed signals nobody: its runs stop, so that the next sweep finds their folders free
    parent = os.getppid() if os.environ.get("TRAINER_PARENT") == str(os.getppid()) else None
    while any(child.poll() is None for child in children):
        if parent not in (None, os.getppid()):
            parent = None
            signals.append(signal.SIGTERM)
            send(signal.SIGTERM)
        if failed_at is None and any(child.poll() not in (None, 0, STOPPED) for child in children):
            failed_at = time.monotonic()
            send(signal.SIGCONT)  # a rank that was stopped (SIGSTOP) must run to hear that the run is over
        # a rank that did not listen yet has ended, and there will be no run; those that did would wait for it
        if signals and any(-(child.poll() or 0) in STOP_SIGNALS for child in children):
            own = [signal.SIGKILL]
            send(signal.SIGKILL)
        # after a failure: first they notice it by themselves, then they are asked to end, then they are killed
        late = time.monotonic() - failed_at if failed_at is not None else 0.0
        if late > _NOTICE_TIMEOUT and not terminated:
            terminated = True
            _report_signals(children, signals)
            send(signal.SIGTERM)
        if late > _NOTICE_TIMEOUT + _KILL_TIMEOUT:
            send(signal.SIGKILL)
        relay.pass_on(_POLL_INTERVAL)
    if not terminated:
        _report_signals(children, [*signals, *own])
    return [child.wait() for child in children]


def _report_signals(children: Sequence[Popen[bytes]], asked: Sequence[int]) -> None:
    """Say which ranks a signal has ended that nobody asked for: they cannot, and if all were, nobody else does."""
    for rank, child in enumerate(children):
        if (code := child.poll()) is not None and code < 0 and -code not in asked:
            hint = "; perhaps memory ran out" if code == -signal.SIGKILL else "; PYTHONFAULTHANDLER=1 shows where"
            say(f"rank {rank} was ended by {signal.Signals(-code).name}{hint}")


# ------------------------------------------------------------------------------------------------- how an attempt ended


def read_failure(scratch: Path) -> str:
    """The message of the rank that failed first; empty where none has left one."""
    first = _first_error_file(scratch)  # in torchrun's format
    return json.loads(first.read_text(encoding="utf-8"))["message"]["message"] if first else ""


def _first_error_file(scratch: Path) -> Path | None:
    def timestamp(path: Path) -> int:
        return int(json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]["timestamp"])

    return min(scratch.glob("*/error.json"), key=timestamp, default=None)


def describe_attempt(folder: Path, message: str) -> FailedAttempt:
    """How the last attempt ended, by the run's files and by the message that its processes have left."""
    status = read_status(folder) or {}
    reason = next(iter(message.splitlines()), "killed, without a last word")
    return FailedAttempt(status.get("step", 0), _newest_checkpoint_step(folder), reason)


class _SavedStep(TypedDict):
    """What is read here of a manifest.json."""

    step: Whole


def _newest_checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    steps = [-1]
    for path in (folder / "checkpoints").glob("[!.]*/manifest.json"):
        with suppress(OSError, DamagedFile):  # removed just now; of no use to the next attempt either
            steps.append(read_json(path, _SavedStep)[0]["step"])
    return max(steps)


# ------------------------------------------------------------------------------------------------- what the ranks print

_READ_BYTES = 65536  # bytes read at once


class OutputRelay:
    """A context that gives the ranks a stdout and a stderr which end where this process prints.

    A stream that is this process's own descriptor is simply shared. Of one that is not (Jupyter's, pytest's,
    `redirect_stdout`) no other process can know: the ranks get a pipe, and `pass_on` prints what comes out of it.
    """

    def __enter__(self) -> Self:
        self._pipes = DefaultSelector()
        self._pipe_ends: list[int] = []
        self.stdout, self.stderr = self._descriptor_for(sys.stdout, 1), self._descriptor_for(sys.stderr, 2)
        return self

    def _descriptor_for(self, stream: TextIO, number: int) -> int | None:
        """The descriptor that a rank gets for this one; None: the same."""
        if _is_descriptor(stream, number):
            return None
        reading, writing = os.pipe()
        self._pipe_ends += [reading, writing]
        # incremental, because the bytes of a character may come in two pieces
        self._pipes.register(reading, EVENT_READ, (codecs.getincrementaldecoder("utf-8")("replace"), stream))
        return writing

    def pass_on(self, seconds: float) -> bool:
        """Wait so long for output, and print it; was there any?

        It is printed in the thread that calls: by it a notebook knows to which cell the output belongs.
        """
        ready = self._pipes.select(seconds)
        for key, _ in ready:
            decoder, stream = key.data
            # the reader of the stream may be gone, which is no reason to stop
            with suppress(OSError, ValueError):
                print(decoder.decode(os.read(key.fd, _READ_BYTES)), end="", file=stream, flush=True)
        return bool(ready)

    def __exit__(self, *_: object) -> None:
        """Print what is left. This process keeps its own ends open until now, so no pipe ends before."""
        while self.pass_on(0):
            pass
        self._pipes.close()
        for end in self._pipe_ends:
            os.close(end)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    """Does the stream write to the descriptor that child processes have under this number?"""
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # none at all; one without a descriptor; closed
        return False
