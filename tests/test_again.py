"""`processes=N distributed.restarts=R` starts the ranks again after a failure, as long as that gets the run further."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PATIENCE, SMALL, Command, curve, single, status
from trainer.api import processes_to_start
from trainer.configuration.compose import compose
from trainer.launch import local_launcher
from trainer.launch.failure import STOPPED
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import read_status
from trainer.messages import Refusal

KILLED = "Another process of the run ended without a message"
# of each try: its exit code, the last step that it reports, its newest checkpoint, what it says went wrong
Try = tuple[int, int, int, str]


def end_of(
    tries: Sequence[Try], restarts: int, folder: Path, monkeypatch: pytest.MonkeyPatch, asked: Sequence[int] = ()
) -> tuple[int, int]:
    """The exit code, and how many tries it took."""
    left = list(tries)

    def start(words: Sequence[str], count: int, scratch: Path, attempt: int) -> tuple[int, list[int]]:
        code, step, saved, why = left.pop(0)
        assert attempt == len(tries) - len(left) - 1
        (folder / "status.json").write_text(json.dumps({"state": "running", "step": step}))
        if saved >= 0:
            place = folder / "checkpoints" / f"step-{saved}"
            place.mkdir(parents=True, exist_ok=True)
            said: dict[str, Any] = {"format": 1, "step": saved, "figures": {}, "files": {}, "sha256": ""}
            (place / "manifest.json").write_text(json.dumps(said))
        if why:
            (scratch / "0").mkdir()
            account = {"message": {"message": why, "extraInfo": {"timestamp": "1"}}}
            (scratch / "0" / "error.json").write_text(json.dumps(account))
        return code, list(asked)

    monkeypatch.setattr(local_launcher, "run_ranks", start)
    scratch = folder / "scratch"
    scratch.mkdir()
    code, _, _ = local_launcher.run_with_restarts([], 2, scratch, folder, restarts)
    return code, len(tries) - len(left)


ONCE, TWICE = (1, 7, -1, KILLED), (1, 9, -1, KILLED)
ON = [(1, step + 5, step, KILLED) for step in (10, 20, 30, 40)]  # each try saves once and is killed
CASES = {
    "nothing fails": ([(0, 50, 50, "")], 3, (0, 1)),
    "healed": ([ONCE, (0, 50, 50, "")], 3, (0, 2)),
    "stopped, and so it stays": ([ONCE, (STOPPED, 50, 50, "")], 3, (STOPPED, 2)),
    "refused": ([(2, 0, -1, "no such file")], 3, (2, 1)),
    "no budget": ([ONCE], 0, (1, 1)),
    "spent": ([ONCE, TWICE, (1, 8, -1, KILLED), ONCE], 2, (1, 3)),
    "refilled by checkpoints": ([*ON, (0, 50, 50, "")], 1, (0, 5)),
    "the same twice": ([(1, 7, -1, "ValueError: 7"), (1, 7, -1, "ValueError: 7"), ONCE], 9, (1, 2)),
    "the same without a word": ([(1, 0, -1, ""), (1, 0, -1, ""), ONCE], 9, (1, 2)),
    "two reasons at one step": ([ONCE, (1, 7, -1, "OSError"), (0, 50, 50, "")], 9, (0, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_tried_again_as_long_as_there_is_progress(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries, restarts, expected = CASES[case]
    assert end_of(tries, restarts, tmp_path, monkeypatch) == expected
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("restart     from ") for line in said[: expected[1] - 1]] == [True] * (expected[1] - 1)
    ends = [line for line in said if line.startswith("no restart  ")]
    assert len(ends) == (expected[0] == 1 and restarts > 0)


def test_a_run_that_was_asked_to_stop_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of([ONCE, ONCE], 3, tmp_path, monkeypatch, asked=[signal.SIGTERM]) == (1, 1)


NOTHING, ASKED = "pass", "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
CRASH, KILL = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGSEGV", "SIGKILL"))


@pytest.mark.parametrize(
    ("acts", "code", "said"),
    [
        ((CRASH, CRASH), 1, [f"rank {rank} was ended by SIGSEGV; PYTHONFAULTHANDLER=1 shows where" for rank in (0, 1)]),
        ((NOTHING, KILL), 1, ["rank 1 was ended by SIGKILL; perhaps memory ran out"]),
        (("signal.pause()", ASKED), STOPPED, ["interrupted before the run began"]),  # before it could listen
        ((NOTHING, NOTHING), 0, []),
    ],
)
def test_what_ended_ranks_without_a_word_is_said(
    acts: Sequence[str],
    code: int,
    said: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(words: Sequence[str], environment: Mapping[str, str], *streams: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", f"import os, signal; {acts[int(environment['RANK'])]}"])

    monkeypatch.setattr(local_launcher, "start_program", start)
    assert local_launcher.run_ranks([], 2, tmp_path, 0)[0] == code
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("when", ["0", "1"])
def test_a_request_while_ranks_are_started_ends_the_run_before_it_began(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: Sequence[str], environment: Mapping[str, str], *streams: int | None) -> subprocess.Popen[bytes]:
        if environment["RANK"] == when:
            os.kill(os.getpid(), signal.SIGINT)
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    monkeypatch.setattr(local_launcher, "start_program", start)
    assert local_launcher.run_ranks([], 2, tmp_path, 0) == (STOPPED, [signal.SIGINT])


@pytest.mark.slow
def test_ctrl_c_while_the_ranks_still_import_is_answered_in_one_line(tmp_path: Path) -> None:
    # of its own language, so started from nothing, as users do
    command = Command(single(*SMALL, "device=cpu", "processes=2"), tmp_path, {"LC_ALL": "C.UTF-8"})
    until = time.monotonic() + PATIENCE
    while len(command.members()) < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.screen, ended.left) == (STOPPED, "interrupted before the run began\n", [])


def test_a_rank_that_listens_does_not_wait_for_one_that_did_not_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(meeting := tmp_path / "meeting")
    acts = [
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(meeting)!r}, 'w').close(); signal.pause()",
        f"open({str(meeting)!r}).close(); {ASKED}",
    ]

    def start(words: Sequence[str], environment: Mapping[str, str], *streams: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", f"import os, signal; {acts[int(environment['RANK'])]}"])

    monkeypatch.setattr(local_launcher, "start_program", start)
    assert local_launcher.run_ranks([], 2, tmp_path, 0) == (STOPPED, [signal.SIGTERM])
    assert capsys.readouterr().err == "interrupted before the run began\n"


def test_of_more_processes_than_cores_each_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of two threads on two cores took 18 times as long: OpenMP's threads wait by looking again and again."""
    threads = []

    def start(words: Sequence[str], environment: Mapping[str, str], *streams: int | None) -> subprocess.Popen[bytes]:
        threads.append(environment["OMP_NUM_THREADS"])
        return subprocess.Popen(["true"])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(local_launcher, "start_program", start)
    assert local_launcher.run_ranks([], 3, tmp_path, 0) == (0, [])
    assert threads == ["1", "1", "1"]


def test_restarts_stand_with_processes() -> None:
    with pytest.raises(Refusal, match=r"distributed\.restarts=2 .* add processes=N"):
        processes_to_start(compose(["distributed.restarts=2"]), Launch())
    cases = ("processes=1", "processes=2", "seed=1")
    counts = {words: processes_to_start(compose(words.split()), Launch()) for words in cases}
    assert counts == {"processes=1": 0, "processes=2": 2, "seed=1": 0}
    assert processes_to_start(compose(["processes=1", "distributed.restarts=2"]), Launch()) == 1


@pytest.mark.long
@pytest.mark.slow
def test_killed_ranks_are_started_again_in_the_folder_that_they_have_made(tmp_path: Path) -> None:
    words = (*SMALL, "schedule=constant", "loop.steps=1000000", "loop.eval_every=null", "loop.save_every=10", "log=[]")
    command = Command(single(*words, "processes=2", "distributed.restarts=1"), tmp_path)
    for attempt, rank in enumerate((1, 0), 1):  # the checkpoints of each try fill the budget of one again
        folder = trained(tmp_path / "runs", attempt)
        os.kill(command.rank(rank), signal.SIGKILL)
    folder = trained(tmp_path / "runs", 3)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (STOPPED, []), ended.screen
    assert list((tmp_path / "runs").iterdir()) == [folder]  # of a generated name
    assert (status(folder)["state"], status(folder)["attempt"]) == ("preempted", 3)
    assert len(curve(folder)) == status(folder)["step"]
    told = [line for line in ended.screen.splitlines() if line.startswith("restart ")]
    assert len(told) == 2
    wanted_line = rf"restart     from step [\d,]+, after a failure at step [\d,]+: {KILLED}"
    assert all(re.match(wanted_line, line) for line in told), told


def trained(root: Path, attempt: int) -> Path:
    """The folder of the only run, once this start of it has saved."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for folder in root.glob("*"):
            said = read_status(folder) or {}
            steps = [int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*")]
            if said.get("attempt") == attempt and max(steps, default=0) > said["resume_step"]:
                return folder
        time.sleep(0.05)
    raise AssertionError(f"start {attempt} has not saved")
