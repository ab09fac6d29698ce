"""Ranks for torchrun that have imported already: copies of the process that becomes torchrun, made before it runs.

torchrun starts `python -u -m MODULE WORDS` for each rank, which spends most of its time on imports. A spare is a child
of torchrun as those are, waits for its words and its environment, and becomes that command. It is asked where torchrun
calls `Popen`; where no spare is left (a restart), or the command is another one, torchrun starts the process itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Become = Callable[[list[str], str, dict[str, str]], None]
_LARGEST = 2**18  # bytes of a request
_START = (sys.executable, "-u", "-m")


class Spare:
    """A rank under way; what torchrun uses of `subprocess.Popen`."""

    def __init__(self, become: Become, others: list[Spare]) -> None:
        self.returncode: int | None = None
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
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
