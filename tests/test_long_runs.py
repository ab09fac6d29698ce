"""Runs of ten million steps: what a start, and the end of one, read of their files does not grow with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import SMALL, lines
from tests.inside import product
from trainer.jobs.goodput_report import read_costs
from trainer.launch.rendezvous import Launch

HOLE = 2**36  # bytes without a line break, of which the disk holds none: who reads them has no memory left
FILES = ("metrics.jsonl", "tensorboard/events.out.tfevents.1.old.1.0")


def make_long(path: Path) -> None:
    """As if many gigabytes stood between the first line of the file and its last ones."""
    path.touch()
    head, _, tail = path.read_bytes().partition(b"\n")
    with path.open("wb") as file:
        file.write(head + b"\n")
        file.seek(HOLE)
        file.write(b"\n" + tail)


@pytest.mark.long
@pytest.mark.parametrize("evaluation", ["loop.eval_every=5", "data=synthetic_images"])
def test_gigabytes_of_earlier_steps_are_not_read(tmp_path: Path, evaluation: str) -> None:
    words = [*SMALL, evaluation, "loop.steps=10", "loop.global_batch=8", "run.dir=run", "log=[tensorboard]"]
    words += ["data.size=64", "data.evaluation_size=0"] if evaluation.startswith("data") else []
    assert product(Launch(), tmp_path, [*words, "schedule=constant"]) == 0
    for name in FILES:
        make_long(tmp_path / "run" / name)
    assert product(Launch(), tmp_path, [*words, "schedule=constant", "loop.steps=12"]) == 0
    with (tmp_path / "run/metrics.jsonl").open("rb") as file:
        file.seek(HOLE + 1)
        assert b"\0" not in (tail := file.read())
    assert tail.count(b"\n") >= 11


@pytest.mark.long
def test_a_hundred_thousand_starts_are_counted_at_the_end_and_listed_in_a_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*SMALL, "loop.global_batch=8", "loop.steps=1", "schedule=constant", "run.dir=run"]
    assert product(Launch(), tmp_path, words) == 0
    (start,) = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
    before = {"state": "failed", "reason": "killed", "step": 1, "time": start["began"], "seconds": {}}
    rows = [json.dumps({**start, "attempt": number, "before": before}) + "\n" for number in range(2, 3_001)]
    with (run / "starts.jsonl").open("a") as file:
        file.writelines(rows)
    assert product(Launch(), tmp_path, [*words, "loop.steps=2"]) == 0
    costs = read_costs(run)
    assert costs is not None
    assert (costs["attempts"], costs["restarts"]) == (3_001, 2_999)
    assert "restarts    2999 of 3001 starts" in (run / "logs/rank-0.log").read_text().replace(",", "")
    assert product(Launch(), tmp_path, ["run.dir=run", "job=report"]) == 0
    report = json.loads((run / "report/report.json").read_text())
    assert (len(report["starts"]), report["starts"][7]["because"]) == (3_001, "killed")
    assert [line["step"] for line in lines(run, "train")] == [1, 2]
