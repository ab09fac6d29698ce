"""A lab: Python and yaml files outside the package, named on the command line, trained like the product's own."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.run import curve, far, lines, run, start, status

CHOICES = ("--config-dir", "lab/conf", "model=look", "data=cells", "task=sorting", "optimizer=heavy", "device=cpu")
LENGTH = ("loop.global_batch=12", "loop.eval_batch=8", "loop.epochs=2", "loop.log_every=1", "schedule=constant")


def words(folder: str, *others: str) -> list[str]:
    return [*CHOICES, *LENGTH, f"run.dir={folder}", *others]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder far from the checkout, with the lab in it."""
    place = tmp_path_factory.mktemp("home")
    shutil.copytree(Path(__file__).parent / "lab", place / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    return run(words("alone", "loader.workers=0"), place=home).folder


def same_curve(folder: Path, alone: Path) -> None:
    assert far(curve(folder), curve(alone)) < 1e-5
    assert far(curve(folder, "grad_norm"), curve(alone, "grad_norm")) < 1e-4
    assert curve(folder, "sample_digest") == curve(alone, "sample_digest")
    for one, other in zip(lines(folder, "eval"), lines(alone, "eval"), strict=True):
        assert (one.pop("kind"), other.pop("kind")) == ("eval", "eval")
        assert one == pytest.approx(other, rel=1e-5)


def test_a_lab_trains_on_two_ranks_as_on_one(processes: object, home: Path, alone: Path) -> None:
    run(words("two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=3"), 2, "group", place=home)
    same_curve(home / "two", alone)
    train, evaluations = lines(alone, "train"), lines(alone, "eval")
    assert len(train) == 8  # 50 in the order, 12 a step, 2 epochs
    assert {"entropy", "size"} <= set(train[0])  # parts of the loss
    assert train[0]["loss"] == pytest.approx(train[0]["entropy"] + train[0]["size"], rel=1e-5)
    assert [line["samples"] for line in evaluations] == [17, 17]
    assert set(evaluations[0]) == {"kind", "step", "epoch", "samples", "loss", "perplexity", "recall"}
    assert status(home / "two")["strategy"] == "ddp"


@pytest.mark.long
def test_a_rank_that_just_leaves_fails_the_run(home: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1]), "WORLD_SIZE": "2"}
    left = words("left", "strategy=ddp", "loader.workers=0", "data.leaves=true")
    each = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    first, second = [one.end() for one in [start(left, place=home, environment=own) for own in each]]
    assert (first.code, first.left) == (1, []), first.out
    assert second.code == 0
    assert status(home / "left")["state"] == "failed"
    assert "rank 0 of 2 failed" in first.out
