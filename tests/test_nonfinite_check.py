"""Nothing that is not finite is ever committed; what it came from is said: step, rank, samples."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.commands import lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from trainer.data.loader import Batch
from trainer.launch.rendezvous import Launch
from trainer.messages import NotFinite
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import find_not_finite, trained_tensors
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import CorruptCheckpoint
from trainer.records.checkpoint.store import open_checkpoint
from trainer.strategies import nonfinite_check

# Sample 37 is read in step 5, by rank 1 of 2. What it breaks is said in its task's name.
LAB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from trainer import Data, Plan, Task


class Numbered(Data):
    def train(self):
        numbers = torch.arange(80)
        return TensorDataset(torch.rand(80, 4, generator=torch.Generator().manual_seed(0)), numbers)

    def order(self, epoch, generator):
        return torch.arange(80)

    def evaluation(self):
        return None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x):
        return self.head(self.first(x).relu())

    def plan(self):
        return Plan(tensor={"first": ColwiseParallel(), "head": RowwiseParallel()})


class Fine(Task):
    bad = -1

    def loss(self, output, number):
        return self.lengths(output, number).mean()

    def lengths(self, output, number):
        return output.square().sum(1) + 1


class Gradient(Fine):
    def lengths(self, output, number):  # a square root whose slope at 0 is infinite, times 0: the value is fine
        return (super().lengths(output, number) * (number != 37)).sqrt()


class Loss(Fine):
    def lengths(self, output, number):
        return super().lengths(output, number) / (number != 37)


class Alone(Loss):
    def lengths(self, output, number):  # memory that fails: tensor ranks read the same samples
        return super().lengths(output, number if torch.distributed.get_rank() == 0 else number * 0)
"""
TASKS = {"fine": "Fine", "gradient": "Gradient", "loss": "Loss", "alone": "Alone"}
WORDS = ("--config-dir", "troubled/conf", "model=net", "data=numbered", "loop.global_batch=8", "loop.steps=10")
INF = torch.tensor(math.inf)
RARE = ("loop.log_every=1000", "loop.eval_every=null", "optimizer=adamw")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it; each run has a folder of its own there."""
    place = tmp_path_factory.mktemp("trouble")
    (place / "troubled" / "conf").mkdir(parents=True)
    (place / "troubled" / "lab.py").write_text(LAB)
    named = {"data/numbered": "Numbered", "model/net": "Net"} | {f"task/{n}": kind for n, kind in TASKS.items()}
    for name, kind in named.items():
        path = place / "troubled" / "conf" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"_target_: troubled.lab.{kind}\n")
    return place


def ended(launch: Launch, place: Path, words: list[str]) -> str:
    """What a run ended with: its exit code, or what it said."""
    sys.path.insert(0, str(place))
    try:
        return str(product(launch, place, words))
    except NotFinite as error:
        return str(error)
    finally:
        sys.path.remove(str(place))


def saved(folder: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "strategy",
    quickly(["ddp", "fsdp", "zero1", "pp"], "ddp"),
)
def test_a_gradient_that_is_no_number_is_not_committed(processes: Processes, place: Path, strategy: str) -> None:
    run = place / strategy
    words = [*WORDS, *RARE, f"strategy={strategy}", f"run.dir={run}", "loop.micro_batches=2"]
    said = processes.run(2, ended, place, [*words, "task=gradient", "loop.save_every=[2,5]"])
    assert said[0] == said[1]
    assert "step 5: every loss is finite, but not " in said[0], said[0]
    assert "37" in said[0].split("rank 1: ")[1], said[0]
    assert saved(run) == [2, 4]
    # the same command goes on from step 4, and meets it again; without it, to the end
    assert processes.run(2, ended, place, [*words, "task=gradient", "loop.save_every=[2,5]"]) == said
    assert processes.run(2, ended, place, [*words, "task=fine", "run.accept_changes=true"]) == ["0", "0"]
    assert saved(run) == [2, 4, 10]


@pytest.mark.parametrize("max_norm", ["null", pytest.param("1", marks=pytest.mark.long)])
def test_between_lines_and_saves_too_the_rank_and_its_samples_are_named(
    processes: Processes, place: Path, max_norm: str
) -> None:
    words = [*WORDS, *RARE, f"run.dir={place / 'loss'}{max_norm}", "strategy=ddp", f"loop.max_norm={max_norm}"]
    said = processes.run(2, ended, place, [*words, "task=loss", "loop.save_every=null", "loop.steps=1000000"])
    assert said[0] == said[1]
    assert said[0].startswith("step 5: the loss is inf on rank 1."), said[0]
    assert "rank 1: samples 33, 35, 37, 39\n" in said[0], said[0]
    assert "rank 0" not in said[0]


def test_what_one_tensor_rank_alone_has_seen_in_the_line_before_a_save_holds_up_nobody(
    processes: Processes, place: Path
) -> None:
    words = [*WORDS, f"run.dir={place / 'alone'}", "strategy=tp", "distributed.timeout=5", "distributed.step_timeout=5"]
    said = processes.run(2, ended, place, [*words, "task=alone", "loop.log_every=1", "loop.save_every=5"])
    assert said[0] == said[1]
    assert said[0].startswith("step 5: the loss is inf on rank 0."), said[0]
    assert saved(place / "alone") == []


def test_the_norm_tells_of_a_gradient_in_the_next_step(place: Path) -> None:
    words = [*WORDS, *RARE, "task=gradient", f"run.dir={place / 'norm'}", "loop.max_norm=1", "loop.save_every=null"]
    said = ended(Launch(), place, words)
    assert said.startswith("step 5: the norm of the gradient is nan, and every loss is finite."), said
    assert lines(place / "norm", "train") == []


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_of_an_accelerator_are_looked_at_now_and_then_and_none_is_missed(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(nonfinite_check, "perf_counter", lambda: now[0])
    afar, fine = nonfinite_check.NonFiniteCheckOnDevice(Ranks(), torch.device("cpu")), torch.tensor(1.0)
    seen = []
    for step in range(1, 9):  # the second one is bad; the first look is at step 1, the next one 0.05 s later, at step 5
        now[0] = step / 64
        seen.append(afar.has_found())
        batch = Batch(None, None, torch.tensor([step, step + 100]), range(2), 2)
        afar.record(step, [batch], torch.tensor(number) if step == 2 else fine, fine)
    assert seen == [False] * 5 + [True] * 3
    with pytest.raises(FloatingPointError, match=rf"step 2: the loss is {number}.*\n.*\n.*samples 2, 102"):
        afar.check(True)


def test_a_step_left_out_on_an_accelerator_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(nonfinite_check, "perf_counter", lambda: now[0])
    afar, one = nonfinite_check.NonFiniteCheckOnDevice(Ranks(), torch.device("cpu"), allowed=1), torch.tensor(1.0)
    for step in range(1, 150):  # all is told that has been seen, though the copies that come later have it once more
        now[0] = step / 64
        afar.check(afar.has_found() or step % 7 == 0)
        batch = Batch(None, None, torch.tensor([step]), range(1), 1)
        afar.record(step, [batch], one * math.nan if step in (6, 120) else one, one)
    told = [record.getMessage().split(";")[0] for record in caplog.records]
    assert told == [f"step {step}: the loss is nan" for step in (6, 120)]
    afar.record(150, [batch], one, INF)
    with pytest.raises(
        FloatingPointError, match=r"step 150: the norm of the gradient is inf.*More than 1 of 100 steps"
    ):
        afar.check(True)


def test_what_training_moves_must_be_finite_and_nothing_else() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    network[0].bias.requires_grad_(False)
    network.register_buffer("least", torch.tensor(math.inf))
    state = {**network.state_dict(), "optimizer/0.weight/exp_avg": torch.zeros(3, 2), "optimizer/0.weight/d": INF}
    state |= {"ema/0.weight": torch.zeros(3, 2), "empty": torch.empty(0)}
    moved = trained_tensors(network, state)
    assert find_not_finite(moved) == []
    assert {"0.weight", "1.running_mean", "1.running_var", "optimizer/0.weight/exp_avg", "ema/0.weight"} <= moved.keys()
    for name, number in zip(moved, (math.nan, math.inf, -math.inf) * 3, strict=False):
        broken = moved[name].clone().double().view(-1).index_fill(0, torch.tensor(0), number)
        assert find_not_finite({**moved, name: broken, "last": torch.ones(2)}) == [name]


def test_a_checkpoint_of_an_older_version_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, Ranks())
    fine = {"w": torch.ones(3), "mask": INF.expand(3), "optimizer/w/exp_avg": torch.ones(3), "optimizer/w/d": INF}
    checkpoints.save(1, fine, {})
    checkpoints.save(2, {**fine, "w": torch.tensor([1.0, math.nan, 2.0])}, {})
    checkpoints.save(3, {**fine, "optimizer/w/exp_avg": INF.expand(3)}, {})
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1
    with pytest.raises(CorruptCheckpoint, match="w is not finite"):
        open_checkpoint(tmp_path / "step-00000002", Ranks())
