"""The first failing rank's own error stands last on the screen; everybody is gone soon; a refusal is said once."""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.quick import quickly
from trainer.launch.failure import claim_first_failure, read_first_failure
from trainer.launch.rendezvous import Launch

ROOT = Path(__file__).parents[1]

START = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
from trainer.launch.failure import exit_failed, exit_process, exit_refused
from trainer.launch.launcher_environment import read_launch
from trainer.launch.rank_output import redirect_output
launch = read_launch()
folder = Path(os.environ["FOLDER"])
redirect_output(launch.rank, folder)
"""
GROUP = (
    START
    + """
import torch
import torch.distributed as dist
from trainer.launch.stop_signals import StopRequest
dist.init_process_group("gloo", store=dist.PrefixStore("group", launch.store()), rank=launch.rank,
                        world_size=launch.world_size, timeout=timedelta(seconds=60))
ones = torch.ones(1)
try:
    with StopRequest(launch, folder):
        for step in range(1, 100):
            dist.all_reduce(ones)
            if step == 17 and launch.rank == 1:
                FAULT
except BaseException as error:
    exit_failed(error, launch, folder, step=step)
exit_process(0)
"""
)


def surroundings(folder, **others):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FOLDER": str(folder),
        **{key: str(value) for key, value in others.items()},
    }


def ranks(code, folder, count=2, attempt=0, hosted=True):
    """Start the ranks of a launch as torchrun does, and wait for them; exit codes and what stood on the screen."""
    (folder / "status.json").write_text('{"state": "running", "step": 16}')
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    port = store.port
    if not hosted:  # rank 0 serves one there
        del store
    processes = []
    for rank in range(count):
        error_file = folder / f"attempt_{attempt}" / str(rank) / "error.json"
        error_file.parent.mkdir(parents=True)
        environment = surroundings(
            folder,
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=count,
            LOCAL_WORLD_SIZE=count,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            TORCHELASTIC_USE_AGENT_STORE=str(hosted),
            TORCHELASTIC_RUN_ID="run",
            TORCHELASTIC_RESTART_COUNT=attempt,
            TORCHELASTIC_ERROR_FILE=error_file,
        )
        with (folder / "screen").open("a") as screen:
            processes.append(
                subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=screen, stderr=screen)
            )
    codes = [process.wait(timeout=60) for process in processes]
    return codes, (folder / "screen").read_text()


def left_for_launcher(folder, rank, attempt=0):
    return json.loads((folder / f"attempt_{attempt}" / str(rank) / "error.json").read_text())["message"]


def status(folder):
    return json.loads((folder / "status.json").read_text())


# -------------------------------------------------------------------------------------------------------------- failing


def test_the_first_failing_rank_speaks_alone_and_last(tmp_path):
    codes, screen = ranks(GROUP.replace("FAULT", 'raise ValueError("no such sample: 7")'), tmp_path)
    assert codes == [1, 1]
    assert screen.startswith("rank 1 of 2 failed at step 17:\nTraceback (most recent call last):\n")
    assert screen.endswith("\nValueError: no such sample: 7\n")
    assert screen.count("Traceback") == 1
    assert (status(tmp_path)["state"], status(tmp_path)["root_rank"]) == ("failed", 1)
    assert status(tmp_path)["reason"] == "ValueError: no such sample: 7"
    first, second = left_for_launcher(tmp_path, 1), left_for_launcher(tmp_path, 0)
    assert first["message"] == "ValueError: no such sample: 7"
    assert "Traceback" in first["extraInfo"]["py_callstack"]
    assert int(first["extraInfo"]["timestamp"]) < int(second["extraInfo"]["timestamp"])
    assert second["message"] == "rank 1 failed first: ValueError: no such sample: 7"
    assert "rank 1 failed first" in (tmp_path / "logs" / "rank-0.log").read_text()
    assert "ValueError: no such sample: 7" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.long
def test_of_bad_data_the_sentence_is_all_that_is_said(tmp_path):
    fault = 'from trainer.messages import BadData; raise BadData("3.jpg cannot be read")'
    codes, screen = ranks(GROUP.replace("FAULT", fault), tmp_path)
    assert (codes, screen) == ([1, 1], "rank 1 of 2 failed at step 17:\n3.jpg cannot be read\n")
    assert status(tmp_path)["reason"] == "3.jpg cannot be read"
    assert left_for_launcher(tmp_path, 1)["extraInfo"]["py_callstack"] == screen.rstrip()  # torchrun's last block


@pytest.mark.parametrize("fault", ["ConnectionResetError('Connection reset by peer')", "RuntimeError('Broken pipe')"])
def test_a_connection_of_its_own_that_breaks_is_no_other_rank_s_end(tmp_path, fault):
    codes, screen = ranks(GROUP.replace("FAULT", f"raise {fault}"), tmp_path)
    assert codes == [1, 1]
    assert screen.startswith("rank 1 of 2 failed at step 17:\nTraceback (most recent call last):\n")
    assert "Another process" not in screen
    assert status(tmp_path)["root_rank"] == 1


def test_a_killed_rank_is_reported_by_the_others(tmp_path):
    codes, screen = ranks(GROUP.replace("FAULT", "os.kill(os.getpid(), signal.SIGKILL)"), tmp_path)
    assert codes == [1, -signal.SIGKILL]
    assert re.match("rank 0 of 2 failed at step 1[78]:\n", screen)
    assert screen.splitlines()[-1].startswith("Another process of the run ended without a message")
    assert status(tmp_path)["state"] == "failed"
    assert status(tmp_path)["root_rank"] is None


KILLED = "Another process of the run ended without a message"
FAULTS = [('raise ValueError("no such sample: 7")', 0, "ValueError: no such sample: 7")]
FAULTS += [("os.kill(os.getpid(), signal.SIGKILL)", 1, KILLED)]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "speaks", "reason"), quickly(FAULTS, FAULTS[0]))
def test_a_store_that_goes_with_the_main_rank_makes_nobody_silent_or_speak_twice(tmp_path, fault, speaks, reason):
    code = GROUP.replace("launch.rank == 1", "launch.rank == 0").replace("FAULT", fault)
    codes, screen = ranks(code, tmp_path, hosted=False)
    assert codes == [1 if speaks == 0 else -signal.SIGKILL, 1]
    assert re.match(f"rank {speaks} of 2 failed at step 1[78]:\n", screen)
    assert screen.count("Traceback") == 1
    assert status(tmp_path)["state"] == "failed"
    assert status(tmp_path)["reason"].startswith(reason)


ALONE = (
    START
    + """
try:
    raise ConnectionResetError("Connection reset by peer")  # what another rank's end looks like, but there is none
except BaseException as error:
    exit_failed(error, launch, folder, remedy="REMEDY")
"""
)


@pytest.mark.parametrize("remedy", ["", "try loop.micro_batches=4"])
def test_one_process_fails_with_its_traceback_and_what_to_try(tmp_path, remedy):
    (tmp_path / "status.json").write_text('{"state": "running", "step": 16}')
    code = ALONE.replace("REMEDY", remedy)
    done = subprocess.run(
        [sys.executable, "-c", code], env=surroundings(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("the run failed:\nTraceback")
    assert done.stderr.splitlines()[-1] == (remedy or "ConnectionResetError: Connection reset by peer")
    assert (status(tmp_path)["state"], status(tmp_path)["root_rank"]) == ("failed", 0)


def test_only_one_rank_can_be_first():
    store = dist.HashStore()
    assert read_first_failure(store) is None
    first = claim_first_failure(store, Launch(1, 2), "mine", 1)
    assert claim_first_failure(store, Launch(0, 2), "mine too", 0) == first == read_first_failure(store)
    assert first.rank == 1


# ------------------------------------------------------------------------------------------------------------- refusing

REFUSING = """
import sys
from trainer.launch.failure import exit_refused
from trainer.launch.launcher_environment import read_launch
launch = read_launch()
assert "torch" not in sys.modules
exit_refused("optimizer.lrr is no key; did you mean 'lr'?", launch)
"""


def test_a_refusal_is_printed_once_and_not_again_by_a_restarted_attempt(tmp_path):
    sentence = "optimizer.lrr is no key; did you mean 'lr'?"
    codes, screen = ranks(REFUSING, tmp_path, count=3)
    assert (codes, screen) == ([2, 2, 2], f"{sentence}\n")
    times = [int(left_for_launcher(tmp_path, rank)["extraInfo"]["timestamp"]) for rank in range(3)]
    assert min(times) == times[0]
    assert all(left_for_launcher(tmp_path, rank)["message"] == sentence for rank in range(3))
    codes, screen = ranks(REFUSING, tmp_path, count=3, attempt=1)
    assert (codes, screen) == ([2, 2, 2], f"{sentence}\n")  # of the first attempt
    codes, screen = ranks(REFUSING.replace("lrr", "lrrr"), tmp_path, count=3, attempt=2)
    assert len(screen.splitlines()) == 2  # another sentence is news


def test_one_process_refuses_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REFUSING], env=surroundings(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# --------------------------------------------------------------------------------------------------------------- output

SPEAKING = (
    START
    + """
import logging, warnings
print("from Python")
os.system("echo from a child")
logging.getLogger("somebody").warning("a warning")
warnings.warn("old ways")
from trainer.launch.rank_output import say
say("to the screen")
exit_process(0)
"""
)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_its_log_file_and_the_main_one_the_console(tmp_path, rank):
    environment = surroundings(tmp_path, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    done = subprocess.run([sys.executable, "-c", SPEAKING], env=environment, capture_output=True, text=True, timeout=60)
    kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert done.returncode == 0
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING somebody: a warning$", kept, re.MULTILINE)
    assert "UserWarning: old ways" in kept
    assert ("from Python" in done.stdout, "from a child" in done.stdout) == (rank == 0, rank == 0)
    assert ("from Python" in kept, "from a child" in kept) == (rank == 1, rank == 1)
    assert ("a warning" in done.stderr) == (rank == 0)
    assert done.stderr.splitlines()[-1] == "to the screen"
