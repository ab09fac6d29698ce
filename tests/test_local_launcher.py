"""`processes=N` starts the ranks, forwards requests, and starts them again as long as that gets the run further."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.run import PATIENCE, SMALL, curve, run, start, status
from trainer.launch.local_launcher import run_ranks, run_with_restarts

STOPPED, KILLED = 75, "Another process of the run ended without a message"
# of each attempt: its exit code, the last step that it reports, its newest checkpoint, what it says went wrong
ONCE, TWICE, LATER = (1, 7, -1, KILLED), (1, 9, -1, KILLED), (1, 8, -1, KILLED)
ON = [(1, step + 5, step, KILLED) for step in (10, 20, 30, 40)]  # each attempt saves once and is killed
DONE = (0, 50, 50, "")
ATTEMPTS: dict[str, tuple[list[tuple[int, int, int, str]], int, tuple[int, int]]] = {
    "nothing fails": ([DONE], 3, (0, 1)),
    "healed": ([ONCE, DONE], 3, (0, 2)),
    "stopped, and so it stays": ([ONCE, (STOPPED, 50, 50, "")], 3, (STOPPED, 2)),
    "refused": ([(2, 0, -1, "no such file")], 3, (2, 1)),
    "no budget": ([ONCE], 0, (1, 1)),
    "spent": ([ONCE, TWICE, LATER, ONCE], 2, (1, 3)),
    "refilled by checkpoints": ([*ON, DONE], 1, (0, 5)),
    "the same twice": ([(1, 7, -1, "ValueError: 7"), (1, 7, -1, "ValueError: 7"), ONCE], 9, (1, 2)),
    "the same without a word": ([(1, 0, -1, ""), (1, 0, -1, ""), ONCE], 9, (1, 2)),
    "two reasons at one step": ([ONCE, (1, 7, -1, "OSError"), DONE], 9, (0, 3)),
    "asked to stop": ([ONCE, ONCE], 3, (1, 1)),
}


@pytest.mark.parametrize("case", ATTEMPTS)
def test_a_failure_is_tried_again_as_long_as_there_is_progress(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, restarts, expected = ATTEMPTS[case]
    left = list(attempts)

    def attempt(words: Sequence[str], count: int, scratch: Path, number: int) -> tuple[int, list[int]]:
        assert number == len(attempts) - len(left)
        code, step, saved, why = left.pop(0)
        (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": step}))
        if saved >= 0:
            place = tmp_path / "checkpoints" / f"step-{saved}"
            place.mkdir(parents=True, exist_ok=True)
            said: dict[str, Any] = {"format": 1, "step": saved, "figures": {}, "files": {}, "sha256": ""}
            (place / "manifest.json").write_text(json.dumps(said))
        if why:
            (scratch / "0").mkdir()
            account = {"message": {"message": why, "extraInfo": {"timestamp": "1"}}}
            (scratch / "0" / "error.json").write_text(json.dumps(account))
        return code, [signal.SIGTERM] * (case == "asked to stop")

    (scratch := tmp_path / "scratch").mkdir()
    code, _, _ = run_with_restarts([], 2, scratch, tmp_path, restarts, attempt)
    assert (code, len(attempts) - len(left)) == expected
    told = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    gives_up = expected[0] == 1 and restarts > 0 and case != "asked to stop"
    assert told == ["restart"] * (expected[1] - 1) + ["no restart"] * gives_up


def ranks(*acts: str) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts, in the place of a rank, a process that does its act."""

    def start(words: Sequence[str], environment: Mapping[str, str], *streams: Any) -> subprocess.Popen[bytes]:
        act = acts[int(environment["RANK"])]
        return subprocess.Popen([sys.executable, "-S", "-c", f"import os, signal; {act}"])

    return start


NOTHING, WAITS, ASKED = "pass", "signal.pause()", "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
CRASH, KILL = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGSEGV", "SIGKILL"))
BEFORE = ["interrupted before the run began"]


@pytest.mark.parametrize(
    ("acts", "code", "said"),
    [
        ((CRASH, CRASH), 1, [f"rank {rank} was ended by SIGSEGV; PYTHONFAULTHANDLER=1 shows where" for rank in (0, 1)]),
        ((NOTHING, KILL), 1, ["rank 1 was ended by SIGKILL; perhaps memory ran out"]),
        ((WAITS, ASKED), STOPPED, BEFORE),
        ((NOTHING, NOTHING), 0, []),
    ],
)
def test_what_ended_ranks_without_a_word_is_said(
    acts: Sequence[str], code: int, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks([], 2, tmp_path, 0, ranks(*acts))[0] == code
    assert capsys.readouterr().err.splitlines() == said


def test_of_more_processes_than_cores_each_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of two threads on two cores took 18 times as long: OpenMP's threads wait by looking again and again."""
    threads = []

    def start(words: Sequence[str], environment: Mapping[str, str], *streams: Any) -> subprocess.Popen[bytes]:
        threads.append(environment["OMP_NUM_THREADS"])
        return subprocess.Popen(["true"])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert run_ranks([], 3, tmp_path, 0, start) == (0, [])
    assert threads == ["1", "1", "1"]


def test_restarts_stand_with_processes(tmp_path: Path) -> None:
    refused = run([*SMALL, "distributed.restarts=2"], how="process", place=tmp_path, code=2)
    assert re.search(r"distributed\.restarts=2 .* add processes=N", refused.out)


def test_ctrl_c_while_the_ranks_still_import_is_answered_in_one_line(tmp_path: Path) -> None:
    # of its own language, so started from nothing, as users do
    command = start([*SMALL, "device=cpu"], 2, place=tmp_path, environment={"LC_ALL": "C.UTF-8"})
    until = time.monotonic() + PATIENCE
    while len(command.members()) < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.out, ended.left) == (STOPPED, "interrupted before the run began\n", [])


@pytest.mark.long
def test_killed_ranks_are_started_again_in_the_folder_that_they_have_made(tmp_path: Path) -> None:
    words = (*SMALL, "schedule=constant", "loop.steps=1000000", "loop.eval_every=null", "loop.save_every=10", "log=[]")
    command = start([*words, "device=cpu", "distributed.restarts=1"], 2, place=tmp_path)
    for attempt, rank in enumerate((1, 0), 1):  # the checkpoints of each attempt fill the budget of one again
        trained(tmp_path / "runs", attempt)
        os.kill(command.rank(rank), signal.SIGKILL)
    folder = trained(tmp_path / "runs", 3)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (STOPPED, []), ended.out
    assert list((tmp_path / "runs").iterdir()) == [folder]  # of a generated name
    assert (status(folder)["state"], status(folder)["attempt"]) == ("preempted", 3)
    assert len(curve(folder)) == status(folder)["step"]
    told = [line for line in ended.out.splitlines() if line.startswith("restart ")]
    wanted = rf"restart     from step [\d,]+, after a failure at step [\d,]+: {KILLED}"
    assert len([line for line in told if re.match(wanted, line)]) == len(told) == 2, told


def trained(root: Path, attempt: int) -> Path:
    """The folder of the only run, once this start of it has saved."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for folder in root.glob("*/status.json"):
            said = status(folder.parent)
            steps = [int(path.name.split("-")[1]) for path in folder.parent.glob("checkpoints/step-*")]
            if said["attempt"] == attempt and max(steps, default=0) > said["resume_step"]:
                return folder.parent
        time.sleep(0.05)
    raise AssertionError(f"start {attempt} has not saved")
