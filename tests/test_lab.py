"""A lab: Python and yaml files outside the package, named on the command line, trained like the product's own."""

from __future__ import annotations

import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run import curve, far, lines, run, start, status

pytestmark = pytest.mark.slow

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
def test_workers_and_slices_change_nothing(home: Path, alone: Path) -> None:
    run(words("workers", "loader.workers=2"), place=home)
    assert curve(home / "workers", "loss_hex") == curve(alone, "loss_hex")
    run(words("slices", "loop.micro_batch=3", "loader.workers=0"), place=home)
    same_curve(home / "slices", alone)
    run(words("both", "strategy=ddp", "loader.workers=1", "loop.micro_batches=3"), 2, "torchrun", place=home)
    same_curve(home / "both", alone)


@pytest.mark.long
def test_an_error_in_one_rank_ends_all_and_stands_last(home: Path) -> None:
    torn = words("torn", "strategy=ddp", "loader.workers=0", "data.fault=raise")
    screen = run(torn, 2, "torchrun", place=home, code=1).out
    own, launcher = screen.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    own = "\n".join(line for line in own.splitlines() if "torch/distributed/elastic" not in line)
    ours = own.split("Traceback")
    assert len(ours) == 3, screen  # before, the failing rank's, torchrun's
    assert "rank 1 of 2 failed" in ours[0].splitlines()[-1]
    assert ours[1].rstrip().endswith("ValueError: the picture of sample 21 is torn")
    assert "in _break" in ours[1]
    cause = launcher.split("Root Cause")[1]
    assert "rank      : 1 " in cause
    assert "ValueError: the picture of sample 21 is torn" in cause
    said = status(home / "torn")
    assert (said["state"], said["root_rank"]) == ("failed", 1)
    assert "the picture of sample 21 is torn" in said["reason"]
    assert "sample 21 is torn" in (home / "torn" / "logs" / "rank-1.log").read_text()


@pytest.mark.long
def test_a_rank_that_just_leaves_fails_the_run(home: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1]), "WORLD_SIZE": "2"}
    left = words("left", "strategy=ddp", "loader.workers=0", "data.fault=leave")
    each = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    first, second = [one.end() for one in [start(left, place=home, environment=own) for own in each]]
    assert (first.code, first.left) == (1, []), first.out
    assert second.code == 0
    assert status(home / "left")["state"] == "failed"
    assert "rank 0 of 2 failed" in first.out


@pytest.mark.long
def test_breakpoint_works_in_one_process(home: Path) -> None:
    """A debugger's prompt on a terminal; the answer is typed once it stands there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words("paused", "log=[]", "loader.workers=0", "task.pause=true")],
        cwd=home,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = _read_until(ours, b"(Pdb) ")
    os.write(ours, b"p answer + 1000\n")
    screen += _read_until(ours, b"(Pdb) ")
    os.write(ours, b"c\n")
    screen += _read_until(ours, None)
    assert process.wait(60) == 0, screen.decode(errors="replace")
    os.close(ours)
    assert b"1042" in screen
    assert b"went on after 42" in screen
    assert status(home / "paused")["state"] == "completed"


def _read_until(terminal: int, words: bytes | None) -> bytes:
    """What stands on the terminal until these words come, or (None) until everybody has left it."""
    screen, until = b"", time.monotonic() + 120
    while words is None or words not in screen:
        ready, _, _ = select.select([terminal], [], [], max(until - time.monotonic(), 0))
        assert ready, screen.decode(errors="replace")
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux says so when the last one has closed it
            part = b""
        if not part:
            assert words is None, screen.decode(errors="replace")
            break
        screen += part
    return screen
