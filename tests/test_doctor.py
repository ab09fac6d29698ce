"""`job=doctor`: what it measures, whom it names, and that it accuses nobody who is well."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import permutations
from math import inf
from pathlib import Path
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trainer
from tests.commands import Command, finish, single
from tests.inside import here, product
from trainer.jobs.doctor import host_facts, job, shared_folder, slow_rank
from trainer.jobs.doctor.collectives import OPS, CollectiveTime, plan_groups
from trainer.jobs.doctor.findings import ExaminedRanks
from trainer.jobs.doctor.links import Expectations, Link, LinkSpeed, attribute_bad_links, judge_links, pair_rounds
from trainer.jobs.doctor.report import Baseline, judge_collectives, parse_baseline, read_baseline
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks

QUICK = ("job=doctor", "job.seconds=1")


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "doctor.json").read_text())


def errors(folder: Path) -> list[dict[str, Any]]:
    return [finding for finding in read(folder)["findings"] if finding["level"] == "error"]


def examine(launch: Launch, place: Path, slow_ranks: dict[int, float]) -> int:
    """The job on one rank, which may compute so many times as long as it should; the exit code."""
    factor = slow_ranks.get(launch.rank, 1.0)
    fast = slow_rank.multiply

    def multiply(work: slow_rank.LocalWork) -> None:
        # a slower processor needs more of its own time; what others take meanwhile is none of it
        began = thread_time()
        fast(work)
        until = thread_time() + (factor - 1) * (thread_time() - began)
        while thread_time() < until:
            pass

    with patch.object(slow_rank, "multiply", multiply if factor > 1 else fast):
        return product(launch, place, list(QUICK))


# ---- the whole command


@pytest.mark.long
@pytest.mark.slow
def test_the_command_measures_all_on_four_ranks_whatever_the_model_and_the_data_are(tmp_path: Path) -> None:
    words = ("data=imagefolder", "data.root=nowhere", "model=vit_tiny", "model.width=7")
    screen = finish(single(*QUICK, "processes=4", "device=cpu", *words), tmp_path)
    data = read(tmp_path / "runs")
    assert data["ok"]
    assert "WELL: nothing was found" in screen
    assert {(row["op"], row["group"], row["ranks"]) for row in data["collectives"]} == {
        (op, *group) for op in OPS for group in (("all", 4), ("2 neighbours", 2))
    }
    assert {row["op"] for row in data["collectives"] if row["bytes"] == 2**12} == set(OPS)
    assert all(row["seconds"] > 0 for row in data["collectives"])
    assert sorted((link["from"], link["to"]) for link in data["links"]) == [*permutations(range(4), 2)]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    assert all(rank["descriptors"] > 0 and rank["flops"] > 0 and rank["versions"]["python"] for rank in data["ranks"])
    assert [each["rank"] for each in data["folder"]] == [0, 1]
    assert all(op in screen for op in OPS)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["doctor.json"]


def test_one_process_is_examined_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert here(*QUICK, "run.dir=mine") == 0
    data = read(tmp_path / "mine")
    assert (data["links"], data["collectives"], len(data["ranks"])) == ([], [], 1)
    assert data["ranks"][0]["memory_bytes_per_s"] > 0


@pytest.mark.long
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    command = Command(single("job=doctor", "job.seconds=60", "processes=2", "device=cpu"), tmp_path)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("runs/.doctor-*/logs")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(command.rank(1), signal.SIGSTOP)
    ended = command.end()
    assert (ended.code, ended.left) == (1, [])
    assert "rank 1 of 2 does not answer: its process is stopped" in ended.screen


# ---- a slow rank


@pytest.mark.long
def test_a_slow_rank_is_named_with_its_host(processes: Any, tmp_path: Path) -> None:
    # 1.5 also stands out on a machine that others keep busy; 1.2 is looked for by the long test
    assert processes.run(4, examine, tmp_path, {2: 1.5}) == [1] * 4
    (error,) = (each for each in errors(tmp_path / "runs") if "computes" in each["what"])
    assert (error["rank"], error["host"]) == (2, os.uname().nodename)
    assert "computes 1." in error["what"]
    assert not read(tmp_path / "runs")["ok"]


def slowness(folder: Path) -> list[float]:
    """Of each rank: how slow it was in its best block, or in the middle one if that is less. Above 1.1 it is named."""
    seconds = [rank["work_s"] for rank in read(folder)["ranks"]]  # rank → block → seconds
    best, blocks = [min(times) for times in seconds], list(zip(*seconds, strict=True))

    def ratio(times: Sequence[float], rank: int) -> float:
        return times[rank] / median([*times[:rank], *times[rank + 1 :]])

    return [min(ratio(best, rank), median(ratio(times, rank) for times in blocks)) for rank in range(len(best))]


@pytest.mark.long(one_in=60)  # where other machines change the speed of the cores meanwhile, chance has a say
@pytest.mark.parametrize("trial", range(20))
def test_a_slow_rank_is_named_and_no_healthy_one_accused(processes: Any, tmp_path: Path, trial: int) -> None:
    """With -s, what docs/doctor.md has a table of."""
    slow, folders = trial % 4, [tmp_path / name / "runs" for name in ("healthy", "slow")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert processes.run(4, examine, tmp_path / "healthy", {}) == [0] * 4, errors(folders[0])
    assert processes.run(4, examine, tmp_path / "slow", {slow: 1.2}) == [1] * 4, slowness(folders[1])
    assert [error["rank"] for error in errors(folders[1])] == [slow]
    healthy, others = slowness(folders[0]), slowness(folders[1])
    print(f"\ntrial {trial}: healthy at most {max(healthy):.3f}; rank {slow} slowed {others.pop(slow):.3f}")


# ---- links, and whose fault it is


def test_every_pair_meets_once_and_nobody_twice_in_a_round() -> None:
    for ranks in (2, 3, 4, 7, 8):
        plan = pair_rounds(ranks)
        met = sorted(pair for pairs in plan for pair in pairs)
        assert met == sorted((a, b) for b in range(ranks) for a in range(b))
        assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in plan)
    few = pair_rounds(64, most=4)
    assert [len(pairs) for pairs in few] == [32] * 4
    assert all(len({rank for pair in pairs for rank in pair}) == 64 for pairs in few)
    assert len({pair for pairs in few for pair in pairs}) == 128


def test_a_bad_link_is_told_from_a_bad_rank() -> None:
    pairs = [(a, b) for b in range(4) for a in range(b)]
    assert attribute_bad_links([(0, 2)], pairs) == ([], [(0, 2)])
    assert attribute_bad_links([pair for pair in pairs if 2 in pair], pairs) == ([2], [])
    assert attribute_bad_links([pair for pair in pairs if 2 in pair or pair == (0, 1)], pairs) == ([2], [(0, 1)])
    assert attribute_bad_links([(0, 1)], [(0, 1)]) == ([], [(0, 1)])
    two_pairings = [(0, 1), (2, 3), (1, 2), (0, 3)]  # of four ranks, in two rounds
    assert attribute_bad_links([(0, 1), (1, 2)], two_pairings) == ([1], [])
    assert attribute_bad_links([(0, 1)], two_pairings) == ([], [(0, 1)])


def said_of(bad: dict[tuple[int, int], float], machines: list[str], network_rate: float = inf) -> list[str]:
    """What is found where all links pass 1 GB/s but these."""
    site = ExaminedRanks(Ranks(), torch.device("cpu"), [f"host-{machine}" for machine in machines], machines)
    ranks = range(len(machines))
    links = [Link(a, b, 1e-4, bad.get((min(a, b), max(a, b)), 1e9)) for a in ranks for b in ranks if a != b]
    return [finding.what for finding in judge_links(site, links, Expectations(site, links, {}, network_rate))]


def test_findings_name_the_link_the_rank_or_the_machine() -> None:
    one, four = ["a"] * 4, list("aabbccdd")
    (said,) = said_of({(0, 1): 5e7, (1, 2): 5e7}, list("aaa"))  # two thirds of all links
    assert said.startswith("rank 1 on host-a is slow on all of its links")
    assert said_of({}, one) == said_of({}, four) == []
    assert said_of({(1, 3): 2e8}, one) == []  # in one machine only processors copy, which others use as well
    (said,) = said_of({(1, 3): 5e7}, one)
    assert said.startswith("the link between rank 1 on host-a and rank 3 on host-a passes 50 MB/s; a good link")
    (said,) = said_of({(0, 2): 5e7, (1, 2): 5e7, (2, 3): 5e7}, one)
    assert said.startswith("rank 2 on host-a is slow on all of its links")
    pairs = [(a, b) for b in range(8) for a in range(b)]
    # one cable, of a and c; then all cables of c
    (said,) = said_of({pair: 1e8 for pair in pairs if {four[rank] for rank in pair} == {"a", "c"}}, four)
    assert said.startswith("the link between rank 0 on host-a and rank 4 on host-c (and the 3 others between these")
    (said,) = said_of({pair: 1e8 for pair in pairs if len({4, 5} & {*pair}) == 1}, four)
    assert said.startswith("rank 4 on host-c and the other ranks of its machine: every link to other machines passes")


def test_a_single_link_is_compared_with_its_adapter_and_with_last_time() -> None:
    assert said_of({(0, 1): 2.5e7}, ["a", "b"]) == []
    (said,) = said_of({(0, 1): 2.5e7}, ["a", "b"], network_rate=1.25e9)
    assert said.endswith("passes 25 MB/s; an adapter of its rate passes 125 MB/s at least")
    site = ExaminedRanks(Ranks(), torch.device("cpu"), ["x", "x"], ["a", "a"])
    links = [Link(0, 1, 1e-4, 2.5e7), Link(1, 0, 1e-4, 2.5e7)]
    expectations = Expectations(site, links, {(0, 1): LinkSpeed(1e-4, 1e9)}, inf)
    assert expectations.complaint(links[0]) == "passes 25 MB/s; last time it passed 1 GB/s"
    assert expectations.complaint(Link(1, 0, 0.02, 1e9)).startswith("takes 20 ms; a good link of its kind took 0.1 ms")


# ---- times and groups


def test_groups_are_those_that_strategies_use() -> None:
    def planned(machines: str) -> dict[str, list[list[int]]]:
        ranks = Ranks()
        ranks.size = len(machines)
        return plan_groups(ExaminedRanks(ranks, torch.device("cpu"), list(machines), list(machines)))

    assert planned("aa") == {"all": [[0, 1]]}
    assert planned("aaaaaaaa") == {
        "all": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "2 neighbours": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "4 neighbours": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }
    assert planned("aabb") == {"all": [[0, 1, 2, 3]], "machine": [[0, 1], [2, 3]], "across machines": [[0, 2], [1, 3]]}
    assert planned("abab") == planned("aab") | {"all": [[0, 1, 2, 3]]} == {"all": [[0, 1, 2, 3]]}


# ---- the rest of the machine


def examine_changed(launch: Launch, place: Path, changes: dict[int, dict[str, Any]]) -> int:
    """The job on one rank, for which some functions of the doctor return these values."""
    with ExitStack() as stack:
        for name, value in changes.get(launch.rank, {}).items():
            stack.enter_context(patch(f"trainer.jobs.doctor.{name}", lambda *_, value=value: value))
        return product(launch, place, list(QUICK))


@pytest.mark.long
def test_what_differs_is_named_with_its_rank(processes: Any, tmp_path: Path) -> None:
    other = {"python": "3.0.0", "platform": "Plan9", "packages": {"torch": "0.1"}}
    changes = {"host_facts.software_versions": other}
    ahead = time.time() + 3600
    assert processes.run(2, examine_changed, tmp_path, {1: {**changes, "clock_offset.clock": ahead}}) == [1, 1]
    findings = read(tmp_path / "runs")["findings"]
    levels = {finding["what"]: finding["level"] for finding in findings if finding["rank"] == 1}
    assert [level for what, level in levels.items() if "has python 3.0.0, the others 3." in what] == ["error"]
    assert [level for what, level in levels.items() if "has platform Plan9" in what] == ["warning"]
    assert [level for what, level in levels.items() if "clock that is 3.6e+03 s ahead of that of rank 0" in what] == [
        "warning"
    ]


def test_a_device_that_does_much_less_than_its_data_sheet_is_named() -> None:
    site = ExaminedRanks(Ranks(), torch.device("cpu"), ["x", "x"], ["a", "a"])
    rates = [{"dtype": "bfloat16", "flops": flops} for flops in (700e12, 300e12)]
    (finding,) = slow_rank.judge_rates(site, ["NVIDIA H100 80GB HBM3"] * 2, rates)
    assert finding.what.endswith("computes 300 TFLOP/s, and the data sheet of NVIDIA H100 80GB HBM3 says 989")
    assert finding.rank == 1
    assert slow_rank.judge_rates(site, ["unknown"] * 2, rates) == []


def test_limits_that_are_too_low_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with patch.multiple(host_facts, _limit=lambda _: 100.0, _shared_memory=lambda: 2.0**26):
        assert here(*QUICK) == 1
    (files, memory) = [error["what"] for error in errors(tmp_path / "runs")]
    assert "may open 100 files, and a run of 1 rank needs 256 + 8 × 1 = 264; ulimit -n 264 raises it" in files
    assert "has 64 MiB of shared memory" in memory


def elsewhere(launch: Launch, place: Path) -> int:
    """The job on ranks of which the second one has another disk under the same name."""
    examine_folder = shared_folder.examine_folder

    def look(site: ExaminedRanks, folder: Path) -> Any:
        mine = folder if launch.is_main else place / "elsewhere"
        mine.mkdir(exist_ok=True)
        return examine_folder(site, mine)

    with patch.object(job, "examine_folder", look), patch.object(shared_folder, "_PATIENCE", 0.2):
        return product(launch, place, list(QUICK))


@pytest.mark.long
def test_a_folder_that_is_not_shared_is_an_error(processes: Any, tmp_path: Path) -> None:
    assert processes.run(2, elsewhere, tmp_path) == [1, 1]
    (error,) = (each for each in errors(tmp_path / "runs") if "wrote" in each["what"])  # a busy machine may have others
    assert error["rank"] == 1
    assert "does not see what rank 0 wrote" in error["what"]


def lockless(launch: Launch, place: Path) -> int:
    """The job where nothing locks and O_EXCL is not kept."""

    def open_any(path: Any, flags: int, *mode: int, **keys: Any) -> int:
        return os_open(path, flags & ~os.O_EXCL if "once-" in str(path) else flags, *mode, **keys)

    os_open = os.open
    with patch.object(shared_folder.fcntl, "flock", lambda *_: None), patch.object(shared_folder.os, "open", open_any):
        return product(launch, place, list(QUICK))


@pytest.mark.long
def test_a_folder_without_locks_is_an_error(processes: Any, tmp_path: Path) -> None:
    assert processes.run(2, lockless, tmp_path) == [1, 1]
    assert [error["what"].split(":")[0] for error in errors(tmp_path / "runs")] == [
        f"rank 1 on {os.uname().nodename} gets a lock that rank 0 holds",
        "O_EXCL does not hold in the folder of runs",
    ]


def test_it_is_compared_with_the_last_time_that_all_was_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"from": 0, "to": 1, "latency_s": 1e-4, "bytes_per_s": 1e9}
    row = {"op": "all_reduce", "bytes": 4096, "group": "all", "ranks": 2, "seconds": 1e-3}
    ranks = [{"host": "x", "device": "cpu"}, {"host": "y", "device": "cpu"}]
    well = {"ok": True, "ranks": ranks, "links": [link], "collectives": [row], "before": {}}
    (tmp_path / "doctor.json").write_text(json.dumps(well))
    before = read_baseline(tmp_path)
    ill = well | {"ok": False, "links": [link | {"bytes_per_s": 1.0}], "before": before}
    (tmp_path / "doctor.json").write_text(json.dumps(ill))
    assert read_baseline(tmp_path) == before

    def baseline(*hosts: str) -> Baseline:
        facts: Any = [SimpleNamespace(device="cpu") for _ in hosts]
        return parse_baseline(before, ExaminedRanks(Ranks(), torch.device("cpu"), list(hosts), list(hosts)), facts)

    assert baseline("x", "y").links == {(0, 1): LinkSpeed(1e-4, 1e9)}
    assert baseline("x", "z") == Baseline({}, {})
    slow = CollectiveTime("all_reduce", 4096, "all", 2, 4e-3)
    (finding,) = judge_collectives([slow], baseline("x", "y"))
    assert finding.what == "all_reduce over all: 4 KiB take 4 ms, last time 1 ms"
    assert judge_collectives([slow], baseline("x", "z")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.seconds=0"], "job.seconds=0: seconds for the collectives, above 0"),
        (["job.second=3"], "job.second: there is no such key or group; did you mean job.seconds?"),
        (["run.root=/proc/nowhere"], "job=doctor examines /proc/nowhere and writes doctor.json into it, which fails"),
        (["-m", "seed=1,2"], "-m trains several runs, and job=doctor examines the machines once: leave out -m"),
    ],
)
def test_what_cannot_be_examined_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(Refusal, match=re.escape(message)):
        here("job=doctor", *words)


@pytest.mark.long
def test_from_python_what_is_wrong_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = trainer.run([*QUICK, "device=cpu"])
    assert (result.state, result.metrics, result.folder) == ("completed", {}, tmp_path / "runs")
    with (
        patch.object(host_facts, "_limit", lambda _: 100.0),
        pytest.raises(RuntimeError, match=r"may open 100 files.*doctor.json\)"),
    ):
        trainer.run([*QUICK, "device=cpu"])
