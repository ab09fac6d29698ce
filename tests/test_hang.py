"""A rank that hangs is named with what it does, all ranks leave soon, and whoever is only slow is left alone.

What is left of a run of which a rank was stopped, tests/test_endings.py shows.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run import SMALL, Command, curve, run, start, status
from trainer.launch.hang_detection import (
    Launch,
    RankProgress,
    RollCallAnswer,
    StopRequest,
    Watchdog,
    describe_blocking_rank,
)

RUN = ("strategy=ddp", "device=cpu", "log=[]", "loop.log_every=1", "loop.eval_every=null", "loop.save_every=4")
WORDS = (*RUN, *SMALL[:-1], "loop.steps=9999", "run.dir=run")
SOON = "distributed.step_timeout=2"

# Data of which rank 1 cannot get further once there is a file; a place where it is stopped as it joins.
LAB_WORDS = (
    *(*RUN, "--config-dir", "lab/conf", "data=slow", "model=line", "loop.global_batch=64", "loader.workers=0"),
    "run.dir=run",
)
LAB = """
import os, signal, time
import torch
from torch.utils.data import Dataset
from trainer import Data, Joined

class Stops(Joined):
    def make_groups(self):
        super().make_groups()
        if self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

class Stuck(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        while os.environ.get("RANK") == "1" and os.path.exists("stuck"):
            open("seen", "w").close()
            time.sleep(0.1)  # for ever
        return torch.full((4,), float(index % 7)), index % 2

def line():
    return torch.nn.Linear(4, 2)

class Slow(Data):
    def train(self):
        return Stuck()
    def evaluation(self):
        return None
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with the lab in it."""
    conf = tmp_path / "lab" / "conf"
    for group, node in {"data/slow": "Slow", "model/line": "line", "strategy/stops": "Stops"}.items():
        (conf / group).parent.mkdir(parents=True)
        (conf / f"{group}.yaml").write_text(f"_target_: lab.own.{node}\n")
    (tmp_path / "lab" / "own.py").write_text(LAB)
    return tmp_path


def by_hand(place: Path, *words: str) -> list[Command]:
    """Two ranks that nobody launched: rank 0 serves the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [start(words, place=place, environment={**meeting, "RANK": str(rank)}) for rank in range(2)]


def wait_until(there: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def codes(ranks: list[Command]) -> list[tuple[int, list[int]]]:
    return [(ended.code, ended.left) for ended in [rank.end() for rank in ranks]]


@pytest.mark.long
def test_where_the_rank_that_serves_the_store_was_stopped_all_end(tmp_path: Path) -> None:
    ranks, folder = by_hand(tmp_path, *WORDS, "distributed.step_timeout=3"), tmp_path / "run"
    ranks[0].wait_for_step(folder, 9)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    other = ranks[1].end()
    reason, saves = status(folder)["reason"], sorted((folder / "checkpoints").glob("step-*"))
    assert reason.startswith("rank 0 does not answer, nor the store")
    os.kill(ranks[0].pid, signal.SIGCONT)
    first = ranks[0].end()
    assert [(one.code, one.left) for one in (first, other)] == [(1, [])] * 2
    assert (status(folder)["state"], status(folder)["root_rank"]) == ("failed", 0)
    # it left by itself, wrote nothing more, and did not say that the other had failed
    assert (status(folder)["reason"], sorted((folder / "checkpoints").glob("step-*"))) == (reason, saves)
    assert [one.out.count("does not answer") for one in (first, other)] == [0, 1]
    assert "without a message" not in first.out


@pytest.mark.long
@pytest.mark.parametrize("limit", ["2", "10min"])
def test_a_rank_that_is_busy_with_itself_is_named_with_its_line(lab: Path, limit: str) -> None:
    ranks, folder = by_hand(lab, *LAB_WORDS, "loop.steps=9999", f"distributed.step_timeout={limit}"), lab / "run"
    ranks[0].wait_for_step(folder, 9)
    (lab / "stuck").touch()
    wait_until((lab / "seen").exists)
    if limit == "10min":  # long before that a scheduler asks, and would kill: the last word is said by then
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        wait_until(
            lambda: (status(folder)["reason"] or "").startswith("SIGTERM, and nothing has gone on since: rank 1")
        )
        said = status(folder)
        assert (said["state"], [rank.process.poll() for rank in ranks]) == ("running", [None, None])  # no verdict
        (lab / "stuck").unlink()  # it was only slow: it saves after all
        assert codes(ranks) == [(75, [])] * 2
        assert (status(folder)["state"], status(folder)["reason"]) == ("preempted", "SIGTERM")
        assert (folder / "checkpoints" / f"step-{status(folder)['step']:08}" / "manifest.json").is_file()
    else:
        assert codes(ranks) == [(1, [])] * 2
        said = status(folder)
        assert (said["state"], said["root_rank"]) == ("failed", 1)
    assert "lab/own.py:" in said["reason"]
    assert "in __getitem__: time.sleep(0.1)" in said["reason"]


@pytest.mark.long
def test_a_hang_while_asked_to_stop_ends_soon_and_says_so(tmp_path: Path) -> None:
    command, folder = start(WORDS, 2, place=tmp_path), tmp_path / "run"
    command.wait_for_step(folder, 9)
    os.kill(command.rank(1), signal.SIGSTOP)
    os.kill(command.pid, signal.SIGTERM)
    assert codes([command]) == [(1, [])]  # the time of a step is 10 minutes
    assert (status(folder)["state"], status(folder)["root_rank"]) == ("failed", 1)
    assert status(folder)["reason"].endswith("SIGTERM, and nothing could be saved")


@pytest.mark.long
def test_a_rank_that_is_stopped_as_it_joins_or_in_a_job_is_named_too(lab: Path) -> None:
    ranks = by_hand(lab, *LAB_WORDS, "loop.steps=9999", "strategy=stops", SOON)
    assert codes(ranks) == [(1, [])] * 2
    assert (status(lab / "run")["state"], status(lab / "run")["root_rank"]) == ("failed", 1)
    run([*LAB_WORDS, "loop.steps=4"], place=lab)
    (lab / "stuck").touch()
    words = ("--config-dir", "lab/conf", "run.dir=run", "job=evaluate", "job.split=train", *RUN[:2], SOON)
    ranks, job = by_hand(lab, *words), lab / "run" / "evaluate"
    wait_until((lab / "seen").exists)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert codes(ranks) == [(1, [])] * 2
    assert ranks[0].screen.count("rank 1 of 2 does not answer") == 1
    assert (status(job)["state"], status(job)["root_rank"]) == ("failed", 1)
    assert status(lab / "run")["state"] == "completed"  # of the run itself nothing has changed


@pytest.mark.long
def test_where_all_ranks_were_stopped_nobody_is_late(tmp_path: Path) -> None:
    ranks = by_hand(tmp_path, *WORDS, SOON, "loop.steps=400")
    ranks[0].wait_for_step(tmp_path / "run", 9)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(8)  # what is tested is time that goes by
    assert codes(ranks) == [(0, [])] * 2
    assert len(curve(tmp_path / "run")) == 400


# --------------------------------------------------------------------------------------------------- who holds them up


@pytest.mark.parametrize(
    ("laps", "waits", "rank", "said"),
    [
        ([7, None, 7], [True, True, True], 1, "rank 1 of 3 does not answer"),
        ([7, 6, 7], [True, True, True], 1, "rank 1 of 3 is behind the others (line 1)"),
        ([7, 7, 7], [True, True, False], 2, "rank 2 of 3 does not come to where the others wait (line 2)"),
        ([7, 6, 6], [True, False, False], 1, "rank 1 of 3 is behind the others (line 1), and so rank 2"),
        ([7, 7, 7], [True, True, True], None, "no rank gets further"),
        ([7, 7, 7], [False, False, False], None, "no rank gets further"),
    ],
)
def test_who_is_silent_then_who_is_behind_then_who_does_something_else(
    laps: list[int | None], waits: list[bool], rank: int | None, said: str
) -> None:
    present = {
        number: RollCallAnswer(3, lap, f"line {number}", wait)
        for number, (lap, wait) in enumerate(zip(laps, waits, strict=True))
        if lap is not None
    }
    blamed, sentence = describe_blocking_rank(present, 3)
    assert blamed == rank
    assert sentence.startswith(said)


# ------------------------------------------------------------------------------------------------------- one process


def test_one_process_is_told_where_it_stands_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    late = RankProgress(3, 7, 0.05, 0.05)
    with Watchdog(Launch(), tmp_path, StopRequest(), lambda: late, interval=0.01):
        wait_until(lambda: caplog.records)
    assert "nothing has gone on for 0 s; the run waits on, at " in caplog.text
    assert f"{__file__}:" in caplog.text  # the line of its own code, none of Python's library
    assert "thread MainThread:\n" in (tmp_path / "logs" / "rank-0.log").read_text()
