"""A rank that hangs is named with what it does, all ranks leave soon, and whoever is only slow is left alone."""

from __future__ import annotations

import bdb
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, Command, curve, finish, single, status, torchrun
from trainer.launch import main_thread_watchdog
from trainer.launch.hang_detection import RollCallAnswer, describe_blocking_rank
from trainer.launch.main_thread_watchdog import IdleTimer, RankProgress, Watchdog, current_line, is_in_debugger
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest

RUN = ("strategy=ddp", "device=cpu", "log=[]", "loop.log_every=1", "loop.eval_every=null", "loop.save_every=4")
WORDS = (*RUN, *SMALL[:-1], "loop.steps=9999")
SOON = "distributed.step_timeout=2"

# Data of which rank 1 cannot get further once there is a file; a place where it is stopped as it joins.
LAB_WORDS = ("--config-dir", "lab/conf", "data=slow", "model=line", "loop.global_batch=64", "loader.workers=0")
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


def by_hand(place: Path, *words: str) -> list[Command]:
    """Two ranks that nobody launched: rank 0 serves the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = single(f"run.dir={place / 'run'}", *words)
    return [Command(command, place, {**meeting, "RANK": str(rank)}) for rank in range(2)]


def lab(place: Path) -> None:
    """Leave the lab there."""
    conf = place / "lab" / "conf"
    for group, node in {"data/slow": "Slow", "model/line": "line", "strategy/stops": "Stops"}.items():
        (conf / group).parent.mkdir(parents=True)
        (conf / f"{group}.yaml").write_text(f"_target_: lab.own.{node}\n")
    (place / "lab" / "own.py").write_text(LAB)


def checkpoints(place: Path) -> set[str]:
    """All that is committed; a draft of a save that was under way may go."""
    found = {str(path.relative_to(place)) for path in (place / "run" / "checkpoints").rglob("*")}
    return {name for name in found if "/.tmp-" not in name}


def remark(folder: Path) -> str:
    """What status.json says of a rank that holds up the others while they are asked to stop; waits for it."""
    until = time.monotonic() + 60
    while not (reason := status(folder)["reason"] or "").startswith("SIGTERM, and nothing has gone on since: rank 1 "):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert status(folder)["state"] == "running"  # it is no verdict
    return reason


def log(place: Path, rank: int) -> str:
    return (place / "run" / "logs" / f"rank-{rank}.log").read_text()


# ------------------------------------------------------------------------------------------------------- several ranks


def test_a_stopped_rank_is_named_and_all_end_without_a_launcher(tmp_path) -> None:
    # long enough for a process to know that it was stopped and is not only slow
    ranks = by_hand(tmp_path, *WORDS, "distributed.step_timeout=3")
    ranks[0].wait_for_step(tmp_path / "run", 9)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ended = [rank.end() for rank in ranks]
    assert [(one.code, one.left) for one in ended] == [(1, []), (1, [])]
    said = status(tmp_path / "run")
    assert (said["state"], said["root_rank"]) == ("failed", 1)
    assert said["reason"].startswith("rank 1 of 2 does not answer: its process is stopped")
    # one account on the screen, by a rank that runs
    assert ended[0].screen.count("rank 1 of 2 does not answer") == 1
    assert "  rank 1: no answer\n  rank 0: step " in ended[0].screen
    assert "does not answer" not in ended[1].screen
    # torch's record of the last collectives: the one that rank 0 waits in stands last, and has no end
    waited = json.loads((tmp_path / "run" / "logs" / "collectives-0.json").read_text())["gloo"]["entries"][-1]
    assert waited["profiling_name"].startswith("gloo:")
    # every rank's stacks; the stopped one was made to run again, to say where it was
    assert all("thread MainThread:\n" in log(tmp_path, rank) for rank in (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["hand", "processes", "torchrun"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_whoever_started_them_and_whichever_is_stopped(tmp_path, launcher, stopped) -> None:
    folder = tmp_path / "run"
    if launcher == "hand":
        ranks = by_hand(tmp_path, *WORDS, SOON)
        pids = [rank.pid for rank in ranks]
        ranks[0].wait_for_step(folder, 9)
    else:
        words = [*WORDS, f"run.dir={folder}", SOON]
        ranks = [Command(torchrun(2, *words) if launcher == "torchrun" else single("processes=2", *words), tmp_path)]
        ranks[0].wait_for_step(folder, 9)
        pids = [ranks[0].rank(rank) for rank in range(2)]
    os.kill(pids[stopped], signal.SIGSTOP)
    # the store of torchrun lives on; the one that a stopped rank 0 serves does not, so nobody can tell it to go on
    waits = launcher == "hand" and stopped == 0
    ended = [rank.end() for rank in (ranks[1:] if waits else ranks)]
    assert (status(folder)["state"], status(folder)["root_rank"]) == ("failed", stopped)
    reason, before = status(folder)["reason"], checkpoints(tmp_path)
    assert reason.startswith((f"rank {stopped} of 2 does not answer", "rank 0 does not answer, nor the store"))
    if waits:
        assert ranks[0].process.poll() is None
        os.kill(pids[0], signal.SIGCONT)
        ended.append(ranks[0].end())
    assert [(one.code, one.left) for one in ended] == [(1, [])] * len(ended)
    # it left by itself, wrote nothing more, and did not say that the others had failed
    assert (status(folder)["reason"], checkpoints(tmp_path)) == (reason, before)
    assert sum(one.screen.count("does not answer") for one in ended) == (3 if launcher == "torchrun" else 1)
    assert not any("without a message" in one.screen for one in ended)
    assert all("thread MainThread:\n" in log(tmp_path, rank) for rank in (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("limit", ["2", "10min"])
def test_a_rank_that_is_busy_with_itself_is_named_with_its_line(tmp_path, limit) -> None:
    lab(tmp_path)
    ranks = by_hand(tmp_path, *RUN, *LAB_WORDS, "loop.steps=9999", f"distributed.step_timeout={limit}")
    ranks[0].wait_for_step(tmp_path / "run", 9)
    (tmp_path / "stuck").touch()
    until = time.monotonic() + 60
    while not (tmp_path / "seen").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    if limit == "10min":
        # long before that time is over a scheduler asks, and would kill: the last word is said by then
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        reason = remark(tmp_path / "run")
        assert [rank.process.poll() for rank in ranks] == [None, None]
        (tmp_path / "stuck").unlink()  # it was only slow: it saves after all
        codes, state = [75, 75], "preempted"
    else:
        codes, state = [1, 1], "failed"
    ended = [rank.end() for rank in ranks]
    assert [(one.code, one.left) for one in ended] == [(code, []) for code in codes]
    assert status(tmp_path / "run")["state"] == state
    reason = reason if limit == "10min" else status(tmp_path / "run")["reason"]
    assert "lab/own.py:" in reason
    assert "in __getitem__: time.sleep(0.1)" in reason
    assert status(tmp_path / "run")["root_rank"] == (1 if state == "failed" else None)


@pytest.mark.long
def test_who_was_paused_once_and_later_stops_slowly_still_saves(tmp_path) -> None:
    lab(tmp_path)
    with (tmp_path / "lab" / "own.py").open("a") as file:
        file.write("\nfrom trainer.launch import hang_detection, main_thread_watchdog\n")
        file.write("hang_detection.INTERVAL = main_thread_watchdog.INTERVAL = 0.1\n")
        file.write("hang_detection._ASLEEP_AFTER = main_thread_watchdog.STOP_TIMEOUT = 0.5\n")
    ranks = by_hand(tmp_path, *RUN, *LAB_WORDS, "loop.steps=999999")
    ranks[0].wait_for_step(tmp_path / "run", 9)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1.5)  # what is tested is time that goes by
    os.kill(ranks[1].pid, signal.SIGCONT)
    (tmp_path / "stuck").touch()
    until = time.monotonic() + 60
    while not (tmp_path / "seen").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert "in __getitem__: time.sleep(0.1)" in remark(tmp_path / "run")
    time.sleep(1.5)  # both look at that file some ten times
    assert [rank.process.poll() for rank in ranks] == [None, None]
    (tmp_path / "stuck").unlink()
    ended = [rank.end() for rank in ranks]
    assert [(one.code, one.left) for one in ended] == [(75, [])] * 2, ended
    said = status(tmp_path / "run")
    assert (said["state"], said["reason"]) == ("preempted", "SIGTERM")
    assert (tmp_path / "run" / "checkpoints" / f"step-{said['step']:08}" / "manifest.json").is_file()


@pytest.mark.long
def test_a_hang_while_asked_to_stop_ends_soon_and_says_so(tmp_path) -> None:
    command = Command(single("processes=2", *WORDS, f"run.dir={tmp_path / 'run'}"), tmp_path)
    command.wait_for_step(tmp_path / "run", 9)
    os.kill(command.rank(1), signal.SIGSTOP)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.end()  # the time of a step is 10 minutes
    assert (ended.code, ended.left) == (1, [])
    said = status(tmp_path / "run")
    assert (said["state"], said["root_rank"]) == ("failed", 1)
    assert said["reason"].endswith("SIGTERM, and nothing could be saved")


@pytest.mark.long
def test_a_rank_that_is_stopped_as_it_joins_is_named_too(tmp_path) -> None:
    lab(tmp_path)
    ranks = by_hand(tmp_path, *RUN, *LAB_WORDS, "loop.steps=9999", "strategy=stops", SOON)
    assert [rank.end().code for rank in ranks] == [1, 1]
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["root_rank"]) == ("failed", 1)


@pytest.mark.long
def test_a_job_that_opens_a_run_is_watched_as_well(tmp_path) -> None:
    lab(tmp_path)
    finish(single(*RUN, *LAB_WORDS, "loop.steps=4", f"run.dir={tmp_path / 'run'}"), tmp_path)
    (tmp_path / "stuck").touch()
    words = ("--config-dir", "lab/conf", "job=evaluate", "job.split=train", "strategy=ddp", "device=cpu", SOON)
    ranks, job = by_hand(tmp_path, *words), tmp_path / "run" / "evaluate"
    until = time.monotonic() + 60
    while not (tmp_path / "seen").exists():
        assert time.monotonic() < until, ranks[0].screen
        time.sleep(0.05)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ended = [rank.end() for rank in ranks]
    assert [(one.code, one.left) for one in ended] == [(1, []), (1, [])]
    assert ended[0].screen.count("rank 1 of 2 does not answer") == 1
    assert (status(job)["state"], status(job)["root_rank"]) == ("failed", 1)
    assert status(tmp_path / "run")["state"] == "completed"  # of the run itself nothing has changed
    (tmp_path / "stuck").unlink()
    finish(single(*words, f"run.dir={tmp_path / 'run'}"), tmp_path)
    assert not (job / "status.json").exists()


@pytest.mark.long
def test_where_all_ranks_were_stopped_nobody_is_late(tmp_path) -> None:
    ranks = by_hand(tmp_path, *WORDS, SOON, "loop.steps=400")
    ranks[0].wait_for_step(tmp_path / "run", 9)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(8)  # what is tested is time that goes by
    assert [rank.end().code for rank in ranks] == [0, 0]
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
def test_who_is_silent_then_who_is_behind_then_who_does_something_else(laps, waits, rank, said) -> None:
    present = {
        number: RollCallAnswer(3, lap, f"line {number}", wait)
        for number, (lap, wait) in enumerate(zip(laps, waits, strict=True))
        if lap is not None
    }
    blamed, sentence = describe_blocking_rank(present, 3)
    assert blamed == rank
    assert sentence.startswith(said)


def test_a_thread_is_told_by_the_line_of_its_own_code() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def waits_for_others() -> None:
        reached.set()
        go_on.wait()  # of Python's own library: not the line that tells

    thread = threading.Thread(target=waits_for_others)
    thread.start()
    reached.wait()
    line, waits = current_line(thread.ident)
    assert line.startswith(f"{__file__}:")
    assert " in waits_for_others: " in line
    assert not waits
    assert not is_in_debugger(thread.ident)
    go_on.set()
    thread.join()


# ------------------------------------------------------------------------------------------------------- one process


def watched(folder: Path, pulse: RankProgress, reason: str, until: Callable[[], Any]) -> None:
    """One process under a watchdog, until something is seen; `reason`: for which it was asked to stop."""
    (folder / "logs").mkdir()
    stop = StopRequest()
    stop.raised, stop.reason = bool(reason), reason
    with Watchdog(Launch(), folder, stop, lambda: pulse):
        deadline = time.monotonic() + 30
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_one_process_is_told_where_it_stands_and_left_alone(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(main_thread_watchdog, "INTERVAL", 0.01)
    watched(tmp_path, RankProgress(3, 7, 0.05, 0.05), "", lambda: caplog.records)
    assert "nothing has gone on for 0 s; the run waits on, at " in caplog.text
    assert "thread MainThread:\n" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_one_process_that_was_asked_to_stop_in_vain_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(main_thread_watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(main_thread_watchdog, "STOP_TIMEOUT", 0.05)
    (tmp_path / "status.json").write_text('{"state": "running", "step": 3}')
    watched(tmp_path, RankProgress(3, 7, 600, 600), "SIGTERM", lambda: "reason" in status(tmp_path))
    assert status(tmp_path)["reason"].startswith("SIGTERM, and nothing has gone on since: ")
    assert status(tmp_path)["state"] == "running"


def test_who_stands_in_a_debugger_is_not_late(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(main_thread_watchdog, "INTERVAL", 0.01)
    seen: list[bool] = []

    class Person(bdb.Bdb):
        def user_line(self, frame):
            watched(tmp_path, RankProgress(3, 7, 0.05, 0.05), "", lambda: len(seen) > 20)

    def noted(thread: int) -> bool:
        seen.append(is_in_debugger(thread))
        return seen[-1]

    monkeypatch.setattr(main_thread_watchdog, "is_in_debugger", noted)
    Person().run("pass")
    assert all(seen)
    assert not caplog.records


def test_time_in_which_the_process_did_not_run_does_not_count(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(main_thread_watchdog, "monotonic", lambda: now[0])
    idle, seconds = IdleTimer(), []
    for passed, laps in ((1, 5), (1, 5), (1, 5), (3600, 5), (1, 6), (1, 6)):
        now[0] += passed
        seconds.append(idle.update(laps))
    assert seconds == [0, 1, 2, 4, 0, 1]  # an hour asleep is two looks at most
