"""A request to stop raises a flag and no more; a second Ctrl-C and another rank's failure end the process at once."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.launch.failure import claim_first_failure
from trainer.launch.polling import poll
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest, obey_parent_only

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_raises_the_flag_and_the_handlers_come_back(number):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    threads = threading.active_count()
    with StopRequest() as stop:
        seen = [stop.raised]
        for _ in range(2 if number != signal.SIGINT else 1):  # a second one changes nothing
            os.kill(os.getpid(), number)
        assert [*seen, stop.raised] == [False, True]
        assert stop.reason == number.name
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_a_launcher_that_was_killed_before_anybody_listened_is_missed_all_the_same():
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    with StopRequest(Launch(waiting_parent=launcher.pid)) as stop:
        assert poll(lambda: stop.reason or None, 60) == "the launcher is gone"
    assert stop.raised


def test_in_a_thread_nothing_is_raised_and_nothing_breaks():
    seen = []

    def use():
        with StopRequest() as stop:
            seen.append(stop.raised)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_childs_signals_are_not_the_parents():
    with StopRequest() as stop:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGINT)  # a terminal sends Ctrl-C to decoding processes, too: they go on
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop.raised


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_decoding_process_may_leave_its_end_to_its_parent():
    child = os.fork()
    if not child:
        obey_parent_only()
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_decoding_process_ends_when_its_parent_says_so():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        obey_parent_only()
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, which it passes over
        while signal.SIGTERM in signal.sigpending():  # a second one that comes while the first still waits is none
            os.sched_yield()
        os.write(writer, b"ready")
        while True:
            signal.pause()
    assert os.read(reader, 5) == b"ready"
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


BLOCKED = """
import ctypes, sys, time
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


def blocked(folder, **environment):
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(folder)],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_interrupt_quits_although_the_main_thread_is_stuck(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    process = blocked(tmp_path)
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


def test_a_sigterm_after_another_ranks_failure_ends_a_stuck_process(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    launch = Launch(1, 2, 1, 2, run_id="run", address=f"127.0.0.1:{store.port}", launcher_serves_store=True)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
    }
    process = blocked(tmp_path, **environment)
    ours = launch.store()  # waits for the other
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)  # a preemption: the main thread is left to finish its step
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.6)
    claim_first_failure(ours, launch, "ValueError: no", launch.rank)
    assert process.wait(timeout=10) == 1
    assert '"root_rank": 1' in (tmp_path / "status.json").read_text()
    process.communicate()
