"""`job=doctor`: what it measures, whom it names, and that it accuses nobody who is well."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from time import thread_time
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import Processes
from tests.run import run, start, type_words
from trainer.jobs.doctor import slow_rank
from trainer.launch.rendezvous import Launch

QUICK = ("job=doctor", "job.seconds=1")


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "doctor.json").read_text())


def errors(folder: Path) -> list[dict[str, Any]]:
    return [finding for finding in read(folder)["findings"] if finding["level"] == "error"]


def examine(launch: Launch, place: Path, slow_ranks: dict[int, float]) -> int:
    """The job on one rank, which may compute so many times as long as it should; the exit code."""
    factor = slow_ranks.get(launch.rank, 1.0)
    fast = slow_rank.multiply

    def multiply(work: Any) -> None:
        # a slower processor needs more of its own time; what others take meanwhile is none of it
        began = thread_time()
        fast(work)
        until = thread_time() + (factor - 1) * (thread_time() - began)
        while thread_time() < until:
            pass

    with patch.object(slow_rank, "multiply", multiply if factor > 1 else fast):
        return type_words(launch, place, QUICK, {})[0]


def test_one_process_is_examined_without_a_group(tmp_path: Path) -> None:
    data = read(run([*QUICK, "run.dir=mine"], place=tmp_path).folder)
    assert (data["ok"], data["links"], data["collectives"], len(data["ranks"])) == (True, [], [], 1)
    assert data["ranks"][0]["memory_bytes_per_s"] > 0


@pytest.mark.long
def test_the_command_measures_all_on_four_ranks_whatever_the_model_and_the_data_are(tmp_path: Path) -> None:
    words = ("data=imagefolder", "data.root=nowhere", "model=vit_tiny", "model.width=7", "device=cpu")
    ended = run([*QUICK, *words], 4, "process", place=tmp_path)
    data = read(tmp_path / "runs")
    assert data["ok"]
    assert "WELL: nothing was found" in ended.out
    assert {"all_reduce", "all_gather"} <= {row["op"] for row in data["collectives"]}
    assert all(row["seconds"] > 0 and row["op"] in ended.out for row in data["collectives"])
    assert sorted((link["from"], link["to"]) for link in data["links"]) == [*permutations(range(4), 2)]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    assert all(rank["descriptors"] > 0 and rank["flops"] > 0 and rank["versions"]["python"] for rank in data["ranks"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["doctor.json"]


@pytest.mark.long
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    command = start(["job=doctor", "job.seconds=60", "device=cpu"], 2, place=tmp_path)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("runs/.doctor-*/logs")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(command.rank(1), signal.SIGSTOP)
    ended = command.end()
    assert (ended.code, ended.left) == (1, [])
    assert "rank 1 of 2 does not answer: its process is stopped" in ended.out


@pytest.mark.long  # where other machines change the speed of the cores meanwhile, chance has a say
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_is_named_with_its_host_and_no_healthy_one_accused(
    processes: Processes, tmp_path: Path, slow: int
) -> None:
    for name, ranks, code in (("healthy", {}, 0), ("slow", {slow: 1.5}, 1)):
        (tmp_path / name).mkdir()
        assert processes.run(4, examine, tmp_path / name, ranks) == [code] * 4, errors(tmp_path / name / "runs")
    (error,) = errors(tmp_path / "slow" / "runs")
    assert (error["rank"], error["host"]) == (slow, os.uname().nodename)
    assert "computes 1." in error["what"]
    assert not read(tmp_path / "slow" / "runs")["ok"]


def test_limits_that_are_too_low_are_errors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (260, hard))
    try:
        said = run([*QUICK], place=tmp_path, code=1).out
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (what,) = [error["what"] for error in errors(tmp_path / "runs")]
    assert "may open 260 files, and a run of 1 rank needs 256 + 8 × 1 = 264; ulimit -n 264 raises it" in what
    assert "ulimit -n 264" in said


def examine_elsewhere(launch: Launch, place: Path) -> int:
    """The job where nothing locks, on ranks of which the second has another clock and another Python."""
    now = time.time
    others: list[Any] = [patch("time.time", lambda: now() + 3600), patch("platform.python_version", lambda: "3.0.0")]
    with ExitStack() as stack:
        for each in (patch("fcntl.flock", lambda *_: None), *others[: 2 * launch.rank]):
            stack.enter_context(each)
        return type_words(launch, place, QUICK, {})[0]


@pytest.mark.long
def test_what_differs_is_named_with_its_rank_and_a_folder_without_locks(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(2, examine_elsewhere, tmp_path) == [1, 1]
    levels = {each["what"]: each["level"] for each in read(tmp_path / "runs")["findings"] if each["rank"] == 1}
    assert [level for what, level in levels.items() if "has python 3.0.0, the others 3." in what] == ["error"]
    assert [level for what, level in levels.items() if "s ahead of that of rank 0" in what] == ["warning"]
    assert f"rank 1 on {os.uname().nodename} gets a lock that rank 0 holds" in str(errors(tmp_path / "runs"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.seconds=0"], "job.seconds=0: seconds for the collectives, above 0"),
        (["run.root=/proc/nowhere"], "job=doctor examines /proc/nowhere and writes doctor.json into it, which fails"),
        (["-m", "seed=1,2"], "-m trains several runs, and job=doctor examines the machines once: leave out -m"),
    ],
)
def test_what_cannot_be_examined_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    assert message in run(["job=doctor", *words], place=tmp_path, code=2).out
