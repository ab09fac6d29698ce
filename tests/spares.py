"""Ranks that have imported already: copies of the process that becomes their launcher.

torchrun starts `python -u -m MODULE WORDS` for each rank, which spends most of its time on imports. A spare is a child
of torchrun as those are, waits for its words and its environment, and becomes that command. It is asked where torchrun
calls `Popen`; where no spare is left (a restart), or the command is another one, torchrun starts the process itself.
What starts ranks of `processes=N` and runs of a sweep has no threads, so its copies are made when it calls `Popen`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from trainer.launch import child_processes
from trainer.launch.stop_signals import STOP_SIGNALS

Become = Callable[[list[str], str, dict[str, str]], None]
_LARGEST = 2**18  # bytes of a request
_START = (sys.executable, "-u", "-m")


class Spare:
    """A rank under way; what launchers use of `subprocess.Popen`. streams: its stdout and stderr, None: the same."""

    def __init__(
        self, become: Become, others: list[Spare], streams: tuple[int | None, int | None] = (None, None)
    ) -> None:
        self.returncode: int | None = None
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would print what is still in the buffer
        # a signal in between would find this process's handlers in the copy, and be lost
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            return
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor, stream_end in enumerate(streams, 1):
            if stream_end is not None:
                os.dup2(stream_end, descriptor)
        for spare in (*others, self):
            spare._end.close()
        request = theirs.recv(_LARGEST)
        if not request:
            os._exit(0)  # torchrun has ended
        theirs.close()
        words, environment = json.loads(request)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as -u does
        become(words, os.getcwd(), environment)

    def begin(self, words: list[str], environment: dict[str, str]) -> None:
        """Let it become `python -u -m WORDS` in this environment."""
        with self._end:
            self._end.send(json.dumps([words, environment]).encode())

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if there is none in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now."""
        self.send_signal(signal.SIGKILL)


def start_copies(become: Become) -> None:
    """The processes that this program starts of itself (`python -m trainer WORDS`) will be copies of this process."""

    def start(command: list[str], env: dict[str, str], stdout: int | None, stderr: int | None, **_: Any) -> Spare:
        copy = Spare(become, [], (stdout, stderr))
        copy.begin(command[2:], env)
        return copy

    child_processes.Popen = start  # type: ignore[misc, assignment]


def give_torchrun_spares(words: list[str], become: Become) -> None:
    """If these words are a torchrun, its ranks will be copies of this process."""
    if words[0] != "torch.distributed.run" or "--nproc-per-node" not in words:
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    spares: list[Spare] = []
    for _ in range(int(words[words.index("--nproc-per-node") + 1])):
        spares.append(Spare(become, spares))
    left: Iterator[Spare] = iter(spares)
    start: Any = SubprocessHandler._popen

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        its_own_files = handler._stdout or handler._stderr
        if args[:3] != _START or its_own_files or (spare := next(left, None)) is None:
            return start(handler, args, env)
        spare.begin([*args[3:]], env)
        return spare

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
