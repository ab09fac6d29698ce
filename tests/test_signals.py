"""A request to stop raises a flag and no more; a second Ctrl-C and another rank's failure end the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.run import ROOT
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest, obey_parent_only, stopped_elsewhere_only

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_raises_the_flag_and_the_handlers_come_back(number: signal.Signals) -> None:
    before, threads = [signal.getsignal(one) for one in NUMBERS], threading.active_count()
    with StopRequest() as stop:
        seen = [stop.raised]
        for _ in range(2 if number != signal.SIGINT else 1):  # a second one changes nothing
            os.kill(os.getpid(), number)
        assert [*seen, stop.raised] == [False, True]
        assert stop.reason == number.name
    assert [signal.getsignal(one) for one in NUMBERS] == before
    assert (signal.set_wakeup_fd(-1), threading.active_count()) == (-1, threads)


class Stored(Launch):
    """One of two ranks, with a store in this process."""

    def store(self, timeout: Any = None) -> Any:
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_rank_that_has_failed_is_not_ended_by_its_launcher_before_it_has_told_of_it() -> None:
    def fails() -> None:
        with StopRequest(Stored(1, 2)):
            raise KeyError

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyError):
            fails()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_launcher_that_was_killed_before_anybody_listened_is_missed_all_the_same() -> None:
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    with StopRequest(Launch(waiting_parent=launcher.pid)) as stop:
        until = time.monotonic() + 60
        while not stop.raised and time.monotonic() < until:
            time.sleep(0.01)
    assert stop.reason == "the launcher is gone"


def forked(act: Callable[[], Any]) -> int:
    """A child that does this."""
    if not (child := os.fork()):
        try:
            act()
        finally:
            os._exit(3)
    return child


@forks
def test_a_forked_childs_signals_are_not_the_parents_and_it_may_leave_its_end_to_the_parent() -> None:
    def hears() -> None:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # a terminal sends Ctrl-C to all: it goes on
            os.kill(os.getpid(), number)

    with StopRequest() as stop:
        assert os.waitstatus_to_exitcode(os.waitpid(forked(hears), 0)[1]) == -signal.SIGTERM
        assert not stop.raised

    def leaves_its_end_to_the_parent() -> None:
        obey_parent_only()
        hears()

    assert os.waitstatus_to_exitcode(os.waitpid(forked(leaves_its_end_to_the_parent), 0)[1]) == 3


# ---------------------------------------------------------------------------------- while the main thread is stuck

BLOCKED = """
import ctypes, sys
from dataclasses import replace
from pathlib import Path
from trainer.launch.launcher_environment import read_launch
from trainer.launch.stop_signals import StopRequest
with StopRequest(replace(read_launch(), owns_process=True), Path(sys.argv[1])) as stop:
    print("ready", flush=True)
    # no instruction of Python runs in the main thread from here on, as in a collective that waits
    libc = ctypes.CDLL(None)
    libc.poll.restype = ctypes.c_int
    while libc.poll(None, 0, 600_000):
        pass
"""


def blocked(folder: Path, **environment: str) -> subprocess.Popen[str]:
    (folder / "status.json").write_text('{"state": "running", "step": 3}')
    its = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    words = [sys.executable, "-c", BLOCKED, str(folder)]
    return subprocess.Popen(words, env=its, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_interrupt_quits_although_the_main_thread_is_stuck(tmp_path: Path) -> None:
    process = blocked(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    ended = None
    while ended is None:  # the same Ctrl-C may be delivered twice within half a second
        process.send_signal(signal.SIGINT)
        try:
            ended = process.wait(timeout=0.3)
        except subprocess.TimeoutExpired:
            continue
    assert ended == 1
    assert "interrupted twice" in process.communicate()[1]
    assert '"failed"' in (tmp_path / "status.json").read_text()


FAILING = """
from trainer.launch.failure import claim_first_failure
from trainer.launch.launcher_environment import read_launch
launch = read_launch()
store = launch.store()
input()
claim_first_failure(store, launch, "ValueError: no", launch.rank)
"""


@pytest.mark.long
def test_a_sigterm_after_another_ranks_failure_ends_a_stuck_process(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "PYTHONPATH": str(ROOT)}
    process = blocked(tmp_path, **place, RANK="0")
    words, environment = [sys.executable, "-c", FAILING], {**os.environ, **place, "RANK": "1"}
    other = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"  # they have met
    process.send_signal(signal.SIGTERM)  # a preemption: the main thread is left to finish its step
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.6)
    other.communicate("\n")
    assert process.wait(timeout=60) == 1
    assert '"root_rank": 1' in (tmp_path / "status.json").read_text()
    process.communicate()


# -------------------------------------------------------------------------------------------------- several machines


def left_behind(reasons: list[list[str]], run_id: str = "run") -> list[bool]:
    """Is each rank left behind? `reasons`: of each machine, what each of its processes was asked."""
    flat = [(machine, local, reason) for machine in reasons for local, reason in enumerate(machine)]
    told: list[Any] = []
    launches = []

    def tell(word: Any) -> list[Any]:
        told.append(word)
        return [word]

    for rank, (machine, local, reason) in enumerate(flat):
        stop = StopRequest()
        stop.raised, stop.reason = bool(reason), reason
        launches.append((Launch(rank, len(flat), local, len(machine), run_id=run_id), stop))
    for launch, stop in launches:  # what each of them has to say
        stopped_elsewhere_only(launch, stop, tell, spread=0.0)
    return [stopped_elsewhere_only(launch, stop, lambda _: told, spread=0.0) for launch, stop in launches]


@pytest.mark.parametrize(
    ("reasons", "left"),
    [
        ([["SIGTERM", "SIGTERM"], ["SIGTERM", "SIGTERM"]], [False] * 4),  # a change of machines, the end of a job
        ([["", ""], ["the launcher is gone", "the launcher is gone"]], [True, True, False, False]),
        ([["", "SIGTERM"], ["", ""], ["", ""]], [False, False, True, True, True, True]),
        ([["", ""], ["", ""]], [False] * 4),  # run.stop_after
        ([["", "SIGTERM"]], [False] * 2),  # one machine
    ],
)
def test_a_machine_that_nobody_asked_is_left_behind_by_one_that_was(reasons: list[list[str]], left: list[bool]) -> None:
    assert left_behind(reasons) == left
    assert left_behind(reasons, run_id="") == [False] * len(left)  # where nothing restarts a process it stops as asked
