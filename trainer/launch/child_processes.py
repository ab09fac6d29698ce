"""Every way in which this program starts itself again: as a new program, as a fork, at once or later.

- `start_program`: ranks of `processes=N`, and runs of a sweep
- `run_program`: one process whose output somebody waits for (the reference of `job=verify`)
- `ForkedProcess`, `PreforkedProcess`: the same as copies of this process. What it has imported they need not import
  again, which takes seconds. Only a process that computes nothing itself may be forked: threads, locks and what an
  accelerator's driver keeps are not copied with it.

Nothing here needs torch.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn, Protocol

import trainer
from trainer.launch.stop_signals import STOP_SIGNALS
from trainer.messages import Refusal

_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


class ChildProcess(Protocol):
    """A process that was started, with the methods of `subprocess.Popen`."""

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


# (arguments, environment, stdout, stderr) → a process. The latter two are descriptors; None: those of this process.
ProcessStarter = Callable[[Sequence[str], Mapping[str, str], int | None, int | None], ChildProcess]
# (arguments, environment) → the exit code, and all that was printed, once the process has ended.
ProgramRunner = Callable[[Sequence[str], Mapping[str, str]], tuple[int, str]]


# ------------------------------------------------------------------------------------------------ programs of their own


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def start_program(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> ChildProcess:
    """Start a program with these arguments; it imports what it needs by itself."""
    return subprocess.Popen(
        _command(arguments),
        env=environment,
        # a process that prints into a file is not at the terminal, and must not read from it either
        stdin=None if stdout is None else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, which forwards it once
    )


def run_program(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program with these arguments and wait for it; the exit code, and all that was printed."""
    ended = subprocess.run(
        _command(arguments),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return ended.returncode, ended.stdout


def child_environment(scratch: Path, rank: int = 0) -> dict[str, str]:
    """This process's environment; it also names the parent, and the file where the child reports its failure."""
    file = scratch / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    # the child stops once its parent is gone, which may have been killed
    return {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file), "TRAINER_PARENT": str(os.getpid())}


@contextmanager
def forward_signals(children: Sequence[ChildProcess]) -> Iterator[list[int]]:
    """Inside, requests to stop go to all children, and into the list; only the main thread can hear them."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _: object) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------------- forks

_POLL_INTERVAL = 0.02  # seconds
# NVIDIA's, AMD's, and both under Windows: there each process imports on a core of its own, and no driver is copied
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def can_fork(device: str) -> bool:
    """Can processes that compute on this device (the value of the key) be forked safely?"""
    return sys.platform == "linux" and (device == "cpu" or not any(map(os.path.exists, _ACCELERATORS)))


class ForkedProcess:
    """A copy of this process that calls a function, and ends; with the methods of `subprocess.Popen`."""

    def __init__(self, target: Callable[[], object]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would print what is still in the buffer
        gc.freeze()  # a garbage collection would write into every page, and so copy all of them
        self.returncode: int | None = None
        # a signal in between would find this process's handlers in the child, and be lost
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if not self.pid:
            _call_and_exit(target)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

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


def _call_and_exit(target: Callable[[], object]) -> NoReturn:
    """In the new process: after the function, nothing of the process that forked it may run here."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        target()
        os._exit(0)
    except BaseException:  # nobody else would report what main() lets through
        traceback.print_exc()
    finally:
        os._exit(1)


def set_up_forked_child(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> None:
    """Make this process, which was just forked, like one that was started with these arguments and environment.

    stdout, stderr: descriptors; None: those that it has.
    """
    os.setsid()  # a terminal's Ctrl-C comes to the parent alone, which forwards it once
    for source, descriptor in ((stdout, 1), (stderr, 2)):
        if source is not None:
            os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments


class PreforkedProcess:
    """A ProgramRunner that forks its process now, while this one computes nothing yet; it waits for its arguments."""

    def __init__(self, main: Callable[[], object]) -> None:
        # one pipe takes the request to the child, the other one what it prints back to this process
        request_read, self._request_write = os.pipe()
        self._output_read, output_write = os.pipe()

        def target() -> None:
            os.close(self._request_write)  # or the end of the request would never come
            os.close(self._output_read)
            with open(request_read, encoding="utf-8") as pipe:
                request = pipe.read()
            if request:  # empty: the parent has ended without one
                arguments, environment = json.loads(request)
                set_up_forked_child(arguments, environment, output_write, output_write)
                main()

        self._process: ForkedProcess | None = ForkedProcess(target)
        os.close(request_read)
        os.close(output_write)

    def dismiss(self) -> None:
        """End the process, if nobody has used it."""
        if self._process is not None:
            os.close(self._request_write)
            os.close(self._output_read)
            self._process.wait()
            self._process = None

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """The exit code, and all that was printed. From the second time on it is a program of its own."""
        if self._process is None:
            return run_program(arguments, environment)
        process, self._process = self._process, None
        try:
            # a broken pipe: the process was killed, as its exit code will say
            with suppress(BrokenPipeError), open(self._request_write, "w", encoding="utf-8") as pipe:
                json.dump([list(arguments), dict(environment)], pipe)
            with open(self._output_read, encoding="utf-8", errors="replace") as pipe:
                printed = pipe.read()
            return process.wait(), printed
        finally:
            process.kill()  # does nothing to one that has ended


# ------------------------------------------------------------------------------------- is `trainer` there this program?


def refuse_overwritten() -> None:
    """Refuse where another distribution has written its files over this program's, or taken them away again."""
    if hasattr(trainer, "_HOMES"):
        return
    from importlib.metadata import packages_distributions, version  # looks at all that is installed

    names = ", ".join(f"{name} {version(name)}" for name in packages_distributions().get("trainer", []))
    raise Refusal(
        f"{_PACKAGE_FOLDER} holds another program's __init__.py, or none. Installed there: {names or 'not known'}. Do:"
        " pip uninstall trainer one-curve-trainer, then install one-curve-trainer into an environment of its own"
    )


def refuse_namesake() -> None:
    """Refuse to start `python -m trainer` in the present folder, where something else of that name is found first."""
    folder = os.getcwd()
    spec = PathFinder.find_spec("trainer", [folder])
    # a folder without Python is no package: it has no origin
    if spec and spec.origin and Path(spec.origin).resolve().parent != _PACKAGE_FOLDER:
        raise Refusal(
            f"{spec.origin} is not this program, and processes that start in {folder} find it first, because it is"
            " called trainer too; rename it, or start in another folder"
        )
