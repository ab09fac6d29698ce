"""A rank that holds up the others is named, once; it changes nothing of what is learned."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.commands import curve
from tests.inside import product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.parallel.ranks import COMPLETED, Ranks, Waitable
from trainer.strategies.step_timing import NoStallClock, StallClock, StepTimer, StragglerCheck

# Rank 1 stops at each step for a while, as a debugger or a hypervisor would have it; or reads slowly.
LAB = """
import os, signal, subprocess, time
from torch import distributed
from recipes.vision.classification import Classification
from recipes.vision.digits import Digits


class Stopping(Classification):
    def after_step(self, network, step):
        if distributed.get_rank() == 1:
            with subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)


class Slow(Digits):
    def augment(self, inputs, targets, random, training):
        time.sleep(0.05 * distributed.get_rank() * training)
        return super().augment(inputs, targets, random, training)
"""
WORDS = ("--config-dir", "lagging/conf", "strategy=ddp", "model=mlp", "model.width=16", "log=[console]")
LENGTH = ("loop.steps=16", "loop.global_batch=16", "loop.log_every=1", "loop.eval_every=null", "loop.save_every=null")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it; each run has a folder of its own there."""
    place = tmp_path_factory.mktemp("lag")
    for group in ("task", "data"):
        (place / "lagging" / "conf" / group).mkdir(parents=True)
    (place / "lagging" / "lab.py").write_text(LAB)
    (place / "lagging" / "conf" / "task" / "stopping.yaml").write_text("_target_: lagging.lab.Stopping\n")
    slow = "defaults: [digits, _self_]\n_target_: lagging.lab.Slow\n"
    (place / "lagging" / "conf" / "data" / "slow.yaml").write_text(slow)
    return place


def run(launch: Launch, place: Path, words: list[str]) -> int:
    """A run on this rank, in which half a second of steps is long."""
    sys.path.insert(0, str(place))
    try:
        with patch("trainer.strategies.step_timing.MIN_SECONDS", 0.5):
            return product(launch, place, [*WORDS, *LENGTH, *words])
    finally:
        sys.path.remove(str(place))


def notes(folder: Path) -> list[str]:
    """What was said of ranks that hold up others."""
    return [line for line in (folder / "logs/rank-0.log").read_text().splitlines() if "holds up" in line]


@pytest.mark.long
def test_a_rank_that_stands_still_again_and_again_is_named_and_the_curve_is_the_same(
    processes: Processes, place: Path
) -> None:
    assert processes.run(2, run, place, ["run.dir=calm"]) == [0, 0]
    assert processes.run(2, run, place, ["run.dir=stopped", "task=stopping"]) == [0, 0]
    assert notes(place / "calm") == []
    (said,) = notes(place / "stopped")
    assert " rank 1 on " in said, said
    assert "holds up the others: it stood still" in said, said
    assert curve(place / "stopped", "loss_hex") == curve(place / "calm", "loss_hex")


@pytest.mark.long
def test_a_rank_that_reads_slowly_is_named(processes: Processes, place: Path) -> None:
    assert processes.run(2, run, place, ["run.dir=slow", "data=slow"]) == [0, 0]
    (said,) = notes(place / "slow")
    assert " rank 1 on " in said, said
    assert "read its data for " in said, said


class Company(Ranks):
    """The first of three ranks; what the others tell is added by hand."""

    size = 3
    others = torch.zeros(2, 5, dtype=torch.float64)

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Waitable]:
        return [tensor, *self.others.double()], COMPLETED

    def gather_values(self, value: object) -> list[object]:
        return [("one", 0), ("two", 0), ("two", 1)]


def test_it_is_told_once_and_again_only_after_the_rank_was_well() -> None:
    ranks, watch = Company(), StepTimer(NoStallClock())
    pace = StragglerCheck(ranks, 0, on_cpu=True)

    def line(*rows: list[float]) -> list[str]:
        ranks.others = torch.tensor(rows, dtype=torch.float64)
        pace.start(watch)
        return pace.read()

    # stood still, read, computed, of so many seconds, steps
    fine, slow = [0.0, 0.5, 2.0, 8.0, 10.0], [3.0, 0.5, 2.0, 8.0, 10.0]
    assert line(fine, fine) == []
    (said,) = line(slow, fine)
    assert said == (
        "rank 1 on two holds up the others: it stood still (stopped, swapped out, or without a processor) for 38 % of"
        " the time, they for 0 %"
    )
    assert line(slow, fine) == line(slow, fine) == []
    assert line(fine, fine) == []
    assert len(line(slow, fine)) == 1
    # another stage of a pipeline has other work
    assert line(fine, [0.0, 0.5, 7.0, 8.0, 10.0]) == []
    (said,) = line(fine, [0.0, 5.0, 7.0, 8.0, 10.0])
    assert "rank 2 on two holds up the others: it read its data for 62 % of the time" in said


def test_the_thread_that_looks_at_the_clock_ends_with_whoever_wanted_it() -> None:
    before = {*threading.enumerate()}
    stalls = StallClock()
    (thread,) = {*threading.enumerate()} - before
    del stalls
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(("seconds", "steps"), [(8.0, 9.0), (1.9, 1000.0)])
def test_a_few_steps_say_nothing_yet_and_a_short_time_neither(seconds: float, steps: float) -> None:
    ranks = Company()
    pace = StragglerCheck(ranks, 0, on_cpu=True)
    ranks.others = torch.tensor([[seconds, 0.0, 0.0, seconds, steps], [0.0, 0.0, 0.0, seconds, steps]])
    pace.start(StepTimer(NoStallClock()))
    assert pace.read() == []
    pace.start(StepTimer(NoStallClock()))
    assert len(pace.read()) == 1
