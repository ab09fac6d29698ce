"""Processes that have imported everything: four ranks that stay, and copies that become commands.

A test of a strategy costs a rendezvous and not a launch, a command no imports. Both come from the fork server of
Python's multiprocessing, one for each lane of tests.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import chdir
from datetime import timedelta
from itertools import count
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from trainer.launch.rendezvous import Launch, connect_store, say_goodbye

MOST = 4
PATIENCE = 300.0  # seconds until a group that does not answer is given up
KEPT = 8  # cases until all meshes go: to find out anew how DTensors are spread costs as much as a case with shards
PARTING = 30.0  # the same, once a rank has failed: the others may wait for it in a collective
TRACE_AFTER = 200.0  # seconds until a rank that has not ended its case, and tidied up, writes on stderr where it is

ROOT = Path(__file__).resolve().parents[1]
_path = sys.path[1:]  # of the fork server: what every Python finds, behind its own folder
_main = process.current_process()  # of the fork server: as every program has it that was started alone
groups: list[Processes] = []  # the session's, once a test has asked for it
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.imported"])  # imported once, for all of them

# --------------------------------------------------------------------------------------------------- ranks that stay


class Processes:
    """Runs a function on 1 to 4 ranks and returns what each of them returned."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._members = []
        self._cases = count()
        for rank in range(MOST):
            ours, theirs = _context.Pipe()
            member = _context.Process(target=_serve, args=(theirs, rank == 0), daemon=True)
            _start(member)
            self._pipes.append(ours)
            self._members.append(member)
        self._port = self._pipes[0].recv()
        groups.append(self)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(launch, *args)` on so many ranks; the results in rank order; AssertionError if one fails."""
        case = f"case-{next(self._cases)}"
        for rank in range(size):
            launch = Launch(rank, size, rank, size, 0, case, f"127.0.0.1:{self._port}", launcher_serves_store=True)
            self._pipes[rank].send((launch, function, args))
        answers: dict[int, Any] = {}
        while len(answers) < size:
            patience = PATIENCE if all(fine for fine, _ in answers.values()) else PARTING
            ready = wait([pipe for rank, pipe in enumerate(self._pipes[:size]) if rank not in answers], patience)
            missing = sorted(set(range(size)) - answers.keys())
            assert ready, f"ranks {missing} of {function.__name__} did not answer\n{_failures(answers)}"
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process is gone; what it said last stands on stderr")
        assert not (failed := _failures(answers)), failed
        return [answers[rank][1] for rank in range(size)]

    def close(self) -> None:
        """End the processes."""
        groups.remove(self)
        for pipe in self._pipes:
            pipe.send(None)
        for member in self._members:
            member.join(10)
            if member.is_alive():
                member.kill()


def _serve(pipe: Connection, first: bool) -> None:
    torch.set_num_threads(1)
    if first:  # not the tests' own process: meshes and DTensors live on in torch's caches, and with them connections
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        pipe.send(store.port)
    for case in count():
        if (job := pipe.recv()) is None:
            return
        launch, function, args = job
        faulthandler.dump_traceback_later(TRACE_AFTER)
        try:
            answer = (True, function(launch, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        if dist.is_initialized():  # an error inside `with strategy` leaves the group to the end of the process
            dist.destroy_process_group()
        say_goodbye()  # before the test ends, with whose folder a store in a file goes; and no connection stays open
        pipe.send(answer)
        _forget_meshes(wholly=case % KEPT == 0)
        connect_store.cache_clear()
        gc.collect()
        if case == 0:
            gc.freeze()  # modules: looking at them again after every case costs more than most cases
        faulthandler.cancel_dump_traceback_later()


def _forget_meshes(wholly: bool) -> None:
    """Empty torch's caches of DTensor: they keep every mesh, and a mesh its groups, whose threads wake all the time."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
    if not wholly:
        return
    MeshTopoInfo.build_from_mesh.cache_clear()
    _clear_sharding_prop_cache()


def _failures(answers: dict[int, Any]) -> str:
    """What the ranks that failed said."""
    return "\n".join(f"rank {rank}:\n{answer}" for rank, (fine, answer) in sorted(answers.items()) if not fine)


# ---------------------------------------------------------------------------------------------- copies for a command


class Forked:
    """A command in a copy of the fork server; what these tests use of `subprocess.Popen`."""

    def __init__(self, member: process.BaseProcess) -> None:
        self._member, self.pid = member, member.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._member.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if there is none in time."""
        self._member.join(timeout)
        if self._member.exitcode is None:
            raise subprocess.TimeoutExpired(self._member.name, timeout or 0)
        return self._member.exitcode


def fork_command(words: list[str], place: Path, environment: Mapping[str, str], screen: Path) -> Forked:
    """`python -m WORDS` in this folder and environment, in a session of its own, its output in the file `screen`."""
    screen.touch()
    member = _context.Process(target=_become, args=(words, str(place), dict(environment), str(screen)), daemon=True)
    _start(member)
    return Forked(member)


def _become(words: list[str], place: str, environment: dict[str, str], screen: str = "") -> NoReturn:
    """Be that program until the process ends."""
    os.setsid()
    if screen:
        descriptor = os.open(screen, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        _as_started_alone()
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is another
    sys.path[:] = [place, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_path]
    sys.argv = words
    # ranks of `processes=N` and runs of a sweep are copies of who starts them, which has no threads
    subprocess.Popen._execute_child = _copy_or_start  # type: ignore[attr-defined]
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


def end_server() -> None:
    """End the fork server and wait for it, so that what its copies have cost can be seen."""
    for group in [*groups]:  # the server stays as long as one of its copies
        group.close()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _start(member: process.BaseProcess) -> None:
    with chdir(ROOT):  # where the server, if this is the first one, finds what it imports
        member.start()


def _as_started_alone() -> None:
    """Nothing here is a child of multiprocessing, and nothing of it is shared with who forked this process."""
    process._current_process, process._parent_process = _main, None  # type: ignore[attr-defined]
    atexit.unregister(os._exit)
    tracker: Any = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    forkserver._forkserver.__init__()  # type: ignore[misc]


_start_program: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _copy_or_start(popen: Any, args: list[str], *others: Any) -> None:
    """In the place of Popen's own: `python -m trainer WORDS` is a copy of this process, where that has no threads."""
    if [*args[:3]] != [sys.executable, "-m", "trainer"] or threading.active_count() > 1:
        _start_program(popen, args, *others)
        return
    cwd, environment, pipes = others[4], others[5], others[9:15]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would print what is still in the buffer
    # a signal in between would find this process's handlers in the copy, and be lost
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    popen.pid = os.fork()
    if popen.pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)
        return
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for stream, descriptor in enumerate((pipes[0], pipes[3], pipes[5])):  # what the child reads, and writes to
        if descriptor != -1:
            os.dup2(descriptor, stream)
    for descriptor in {*pipes} - {-1, 0, 1, 2}:
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _become([*args[2:]], cwd or os.getcwd(), dict(environment or os.environ))
