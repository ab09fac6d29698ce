"""One process that has imported what commands import, and becomes each of them in a copy of itself.

`python -m MODULE WORDS` spends most of its time on imports. A copy has them done; it gets the command's own folder,
environment, screen and `__main__`, so that a user could tell the two apart by the time only.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.spares import give_torchrun_spares, start_copies

ROOT = Path(__file__).resolve().parents[1]
_starting = threading.Lock()
_LARGEST = 2**18  # bytes of a request: words and an environment
# What a run imports on its way, beyond the modules of the package.
_ON_THE_WAY = ("torch._dynamo", "torch.distributed.run", "torch.utils.tensorboard")


class Forked:
    """A command that runs in a copy of the warm process; what these tests use of `subprocess.Popen`."""

    def __init__(self, words: list[str], cwd: Path, environment: dict[str, str], screen: int) -> None:
        self.args = words
        self.returncode: int | None = None
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([words, str(cwd), environment]).encode()
        with theirs:
            with _starting:
                warm = _warm()
            socket.send_fds(warm, [request], [theirs.fileno(), screen])
        self.pid = int(self._end.recv(64))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if there is none in time."""
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = int(self._end.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._end.close()
        return self.returncode


@cache
def _warm() -> socket.socket:
    """The way to the warm process, which the first request starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            env=environment,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for pytest
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> tuple[list[str], str, dict[str, str], int]:
    """Make a copy for each request, and tell how it ended; returns in every copy, with what that is to become."""
    ends: dict[int, tuple[int, socket.socket]] = {}  # the descriptor of a copy → its process, who wants to know
    events = select.poll()
    events.register(requests, select.POLLIN)
    while True:
        for fd, _ in events.poll():
            if fd in ends:
                events.unregister(fd)
                pid, end = ends.pop(fd)
                end.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                end.close()
                os.close(fd)
                continue
            request, received, _, _ = socket.recv_fds(requests, _LARGEST, 2)
            if not request:
                os._exit(0)  # the tests are over
            end, screen = socket.socket(fileno=received[0]), received[1]
            pid = os.fork()
            if not pid:
                for one in (requests, end, *(end for _, end in ends.values())):
                    one.close()
                for other in ends:
                    os.close(other)
                return *json.loads(request), screen
            os.close(screen)
            end.send(b"%d" % pid)
            fd = os.pidfd_open(pid)
            ends[fd] = pid, end
            events.register(fd, select.POLLIN)


def _import_all() -> None:
    for name in ("trainer", "recipes"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):  # it needs an extra that is not here
                    importlib.import_module(module.name)
    for name in _ON_THE_WAY:
        importlib.import_module(name)
    del sys.modules["torch.distributed.run"]  # or it says that it is not the first of its name
    gc.collect()
    gc.freeze()  # what is never touched again is never copied


def _begin(words: list[str], cwd: str, environment: dict[str, str], screen: int) -> None:
    """Become `python -m words`, with its output on this screen."""
    for stream in (1, 2):
        os.dup2(screen, stream)
    os.close(screen)
    os.chdir(cwd)
    give_torchrun_spares(words, _become)
    if words[0] == "trainer":  # a notebook's kernel has threads, and a copy of it would wait for them
        start_copies(_become)
    _become(words, cwd, environment)


def _become(words: list[str], cwd: str, environment: dict[str, str]) -> None:
    """`python -m words` in this folder and environment, in a session of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is another
    sys.path[:1], sys.argv = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))], words
    code: object = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # triton would speak as the interpreter ends


if __name__ == "__main__":
    _import_all()
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _begin(*_serve(requests))
