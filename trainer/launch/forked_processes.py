"""Processes that begin where this one stands: what it has imported they need not import again, which takes seconds.

Only a process that computes nothing itself may be forked: threads, locks and what an accelerator's driver keeps are not
copied with it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from trainer.launch.child_processes import run_program
from trainer.launch.stop_signals import STOP_SIGNALS

_POLL_INTERVAL = 0.02  # seconds between two looks at a process that is waited for
# NVIDIA's, AMD's, and both under Windows: there each process imports on a core of its own, and no driver is copied
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def can_fork(device: str) -> bool:
    """Can processes that compute on this device (the value of the key) be forked safely?"""
    return sys.platform == "linux" and (device == "cpu" or not any(map(os.path.exists, _ACCELERATORS)))


class ForkedProcess:
    """A process that does what a function does, and ends; with the verbs of `subprocess.Popen`."""

    def __init__(self, target: Callable[[], object]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both would say it
        gc.freeze()  # a collection would write into every page, and so copy all of them
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run_and_exit(target)

    def poll(self) -> int | None:
        """The exit code, the negative number of a signal; None: it has not ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """The exit code, once there is one."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_INTERVAL)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to one that has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now."""
        self.send_signal(signal.SIGKILL)


def _run_and_exit(target: Callable[[], object]) -> NoReturn:
    """In the new process: nothing of who forked it is to run here after the function."""
    try:
        target()
        os._exit(0)
    except BaseException:  # what main() lets through has no one else to tell it
        traceback.print_exc()
    finally:
        os._exit(1)


def set_up_forked_child(
    words: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> None:
    """Turn this process, which was just forked, into one that was started with these words in this environment.

    stdout, stderr: descriptors; None: those that it has.
    """
    os.setsid()  # a terminal's Ctrl-C goes to who started it alone, and is handed on once
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for end, descriptor in ((stdout, 1), (stderr, 2)):
        if end is not None:
            os.dup2(end, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words


class PreforkedProcess:
    """A process that is forked while this one computes nothing yet, and waits for the words that it is to run alone."""

    def __init__(self, main: Callable[[], object]) -> None:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()

        def target() -> None:
            os.close(self._ask)  # or the end of what is asked would never come
            os.close(self._told)
            with open(asked, encoding="utf-8") as pipe:
                request = pipe.read()
            if request:  # who forked it may have ended without a word
                words, environment = json.loads(request)
                set_up_forked_child(words, environment, tell, tell)
                main()

        self._process: ForkedProcess | None = ForkedProcess(target)
        os.close(asked)
        os.close(tell)

    def __call__(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Run the words; the exit code, and all that was printed. From the second time on in a program of its own."""
        if self._process is None:
            return run_program(words, environment)
        process, self._process = self._process, None
        try:
            with (
                suppress(BrokenPipeError),
                open(self._ask, "w", encoding="utf-8") as pipe,
            ):  # it was killed: its code says so
                json.dump([list(words), dict(environment)], pipe)
            with open(self._told, encoding="utf-8", errors="replace") as pipe:
                printed = pipe.read()
            return process.wait(), printed
        finally:
            process.kill()  # does nothing to one that has ended
