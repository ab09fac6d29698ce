"""Going on after a NaN: what is left out has taught nothing, under every strategy, and too much of it ends the run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands import lines
from tests.processes import Processes
from tests.quick import quickly
from tests.test_nonfinite_check import ended
from trainer.launch.rendezvous import Launch
from trainer.records.checkpoint.manifest import read_manifest
from trainer.records.checkpoint.store import inspect_checkpoint
from trainer.records.checkpoint.tensor_files import load_tensors

# Samples are read in their order, 8 a step; of the poisoned ones the first number is NaN. `without`: steps whose
# samples are not there at all.
LAB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Data, Plan, Task
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Numbered(Data):
    def __init__(self, poisoned: list[int] = [], without: list[int] = []):
        self.poisoned, self.without = poisoned, without

    def train(self):
        inputs = torch.rand(160, 4, generator=torch.Generator().manual_seed(0))
        inputs[self.poisoned, 0] = float("nan")
        return TensorDataset(inputs, torch.arange(160))

    def order(self, epoch, generator):
        steps = torch.arange(160).view(20, 8)
        return steps[[step for step in range(20) if step + 1 not in self.without]].flatten()

    def evaluation(self):
        return None


class Net(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x):
        return self.head(self.norm(self.first(x)).relu())

    def plan(self):
        return Plan(tensor={"first": ColwiseParallel(), "head": RowwiseParallel()})


class Squares(Task):
    def loss(self, output, number):
        return (output - number[:, None] / 160).square().sum(1).mean()
"""
WORDS = ("--config-dir", "poisoned/conf", "model=net", "data=numbered", "task=squares", "loop.global_batch=8")
LENGTH = ("loop.log_every=1", "loop.eval_every=null", "schedule=constant", "optimizer=adamw")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it; each run has a folder of its own there."""
    place = tmp_path_factory.mktemp("poison")
    (place / "poisoned" / "conf").mkdir(parents=True)
    (place / "poisoned" / "lab.py").write_text(LAB)
    yamls = {
        "data/numbered": "Numbered\npoisoned: []\nwithout: []\n",
        "model/net": "Net\nnorm: true\n",
        "task/squares": "Squares\n",
    }
    for name, text in yamls.items():
        path = place / "poisoned" / "conf" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"_target_: poisoned.lab.{text}")
    return place


def state(run: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    path = run / "checkpoints" / f"step-{step:08d}"
    there = inspect_checkpoint(read_manifest(path))
    tensors = {name: torch.empty(fact.shape, dtype=fact.dtype) for name, fact in there.tensors.items()}
    load_tensors(tensors, there)
    return tensors


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Both have the same tensors, as far as sums in another order can be the same."""
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


STRATEGIES: list[Any] = [
    (1, "single", ["precision=fp16", "ema.decay=0.9"]),
    (1, "single", ["optimizer.fused=false", "ema.decay=0.9"]),
    (2, "ddp", ["loop.micro_batches=2"]),
    (2, "zero1", []),
    (2, "fsdp", ["ema.decay=0.9"]),
    (2, "tp", ["model.norm=false"]),
    (2, "pp", ["loop.micro_batches=2", "model.norm=false"]),
]


@pytest.mark.parametrize(("ranks", "strategy", "more"), quickly(STRATEGIES, STRATEGIES[2]))
def test_a_step_that_is_left_out_has_taught_nothing(
    processes: Processes, place: Path, tmp_path: Path, ranks: int, strategy: str, more: list[str]
) -> None:
    words = [*WORDS, *LENGTH, f"strategy={strategy}", *more]
    skipping = [*words, "data.poisoned=[37]", "loop.on_nonfinite=skip", "loop.steps=10", f"run.dir={tmp_path / 'run'}"]
    by_hand = [*words, "data.without=[5]", "loop.steps=9", f"run.dir={tmp_path / 'hand'}"]
    # a step with a broken sample teaches as much as no step at all: not its update, and not the averages of BatchNorm
    for command in (skipping, by_hand):
        assert processes.run(ranks, ended, place, command) == ["0"] * ranks
    left, right = state(tmp_path / "run", 10), state(tmp_path / "hand", 9)
    assert int(left.pop("scaler/left_out")) == 1
    alike(left, right)


def test_each_step_that_is_left_out_is_told_with_its_samples_and_a_resumed_run_leaves_out_the_same(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    words = [*WORDS, *LENGTH, "data.poisoned=[37,58]", "loop.on_nonfinite=skip", "loop.steps=10", f"run.dir={run}"]
    words += ["loop.log_every=4", "loop.save_every=3"]
    with caplog.at_level(logging.WARNING):
        assert ended(Launch(), place, words) == "0"
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    said = "step {0}: the loss is nan; its update is left out. Read were:\n  step {0}, rank 0: samples {1}"
    assert told == [said.format(5, "32, 33, 34, 35, 36, 37, 38, 39"), said.format(8, "56, 57, 58, 59, 60, 61, 62, 63")]
    assert "left out    2 steps whose loss or gradient was not finite" in (run / "logs" / "rank-0.log").read_text()
    # a line is of all steps since the one before that count
    whole = lines(run, "train")
    assert [line["step"] for line in whole] == [4, 8, 10]
    assert all(0 < line["loss_mean"] < 10 for line in whole)
    assert str(whole[1]["loss"]) == "nan"
    # killed after the save of step 6: the steps after it are the same to the bit, and one of the two is counted anew
    before = state(run, 10)
    for step in (9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    status = (run / "status.json").read_text()
    (run / "status.json").write_text(status.replace("completed", "running"))
    assert ended(Launch(), place, words) == "0"
    again = lines(run, "train")
    assert [line["step"] for line in again] == [4, 8, 10]
    assert again[2]["loss_hex"] == whole[2]["loss_hex"]
    assert all(torch.equal(one, before[name]) for name, one in state(run, 10).items())
    assert int(before["scaler/left_out"]) == 2


@pytest.mark.long
def test_too_many_steps_that_are_left_out_end_the_run(processes: Processes, place: Path, tmp_path: Path) -> None:
    words = [*WORDS, *LENGTH, "strategy=ddp", "loop.on_nonfinite=skip", f"run.dir={tmp_path}", "loop.save_every=2"]
    every_fifth = [*range(7, 160, 40)]  # 1 of 5 steps
    said = processes.run(2, ended, place, [*words, f"data.poisoned={every_fifth}", "loop.steps=200"])
    assert said[0] == said[1]
    assert said[0].startswith("step 51: the loss is nan on rank 1. More than 10 of 100 steps would be left out."), said
    assert "step 51, rank 1: samples 81, 83, 85, 87\n" in said[0], said
