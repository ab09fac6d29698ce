"""Nothing that is not finite is ever committed; what it came from is said: step, rank, samples. Or it is left out."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.options import options
from tests.ranks import Processes
from tests.run import Finished, quickly, run
from tests.test_initial_weights import everything
from trainer import Data, Plan, Task
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies import nonfinite_check

INF = torch.tensor(math.inf)


class Numbered(Data):
    """Samples in their order, 8 a step: of two ranks the second reads 37 in step 5. Poisoned ones have a NaN.

    without: steps whose samples are not there at all.
    """

    def __init__(self, poisoned: list[int] = [], without: list[int] = []) -> None:  # noqa: B006  (an option's default)
        self.poisoned, self.without = poisoned, without

    def train(self) -> Any:
        inputs = torch.rand(160, 4, generator=torch.Generator().manual_seed(0))
        inputs[self.poisoned, 0] = math.nan
        return TensorDataset(inputs, torch.arange(160))

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        steps = torch.arange(160).view(20, 8)
        return steps[[step for step in range(20) if step + 1 not in self.without]].flatten()

    def evaluation(self) -> Any:
        return None


class Net(nn.Module):
    """Some of its buffers are infinite, as they should be."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.register_buffer("least", torch.tensor(math.inf))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan(tensor={"first": ColwiseParallel(), "head": RowwiseParallel()})


class Fine(Task):
    def loss(self, output: Tensor, number: Tensor) -> Tensor:
        return self.lengths(output, number).mean()

    def lengths(self, output: Tensor, number: Tensor) -> Tensor:
        return (output - number[:, None] / 160).square().sum(1) + 1


class Gradient(Fine):
    def lengths(self, output: Tensor, number: Tensor) -> Tensor:
        """A square root whose slope at 0 is infinite, times 0: the value is fine."""
        return (super().lengths(output, number) * (number != 37)).sqrt()


class Loss(Fine):
    def lengths(self, output: Tensor, number: Tensor) -> Tensor:
        return super().lengths(output, number) / (number != 37)


WORDS = ["model=net", "data=numbered", "loop.global_batch=8", "loop.steps=10", "loop.eval_every=null"]
WORDS += ["schedule=constant", "optimizer=adamw"]
RARE = ["loop.log_every=1000", "model.norm=false"]


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """Runs of these classes."""
    own = [*options(tmp_path, Numbered, Net, Fine, Gradient, Loss), *WORDS]

    def train(name: str, *words: str, ranks: int = 1, code: int = 0) -> Finished:
        how = "here" if ranks == 1 else "group"
        return run([*own, f"run.dir={name}", *words], ranks, how, place=tmp_path, code=code)  # type: ignore[arg-type]

    return train


def saved(done: Finished) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[5:]) for path in (done.folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp", "zero1", "pp"], "ddp"))
def test_a_gradient_that_is_no_number_is_not_committed(processes: Processes, train: Any, strategy: str) -> None:
    words = ["run", *RARE, f"strategy={strategy}", "loop.micro_batches=2"]
    broken = train(*words, "task=gradient", "loop.save_every=[2,5]", ranks=2, code=1)
    assert "step 5: every loss is finite, but not " in broken.out
    assert "37" in broken.out.split("rank 1: ")[1]
    assert saved(broken) == [2, 4]
    # the same command goes on from step 4, and meets it again; without it, to the end
    again = train(*words, "task=gradient", "loop.save_every=[2,5]", ranks=2, code=1)
    assert "step 5: every loss is finite, but not " in again.out
    assert saved(train(*words, "task=fine", "run.accept_changes=true", ranks=2)) == [2, 4, 10]


def test_between_lines_and_saves_too_the_rank_and_its_samples_are_named(processes: Processes, train: Any) -> None:
    words = ["strategy=ddp", "task=loss", "loop.save_every=null", "loop.steps=1000000"]
    said = train("run", *RARE, *words, ranks=2, code=1).out
    assert "step 5: the loss is inf on rank 1." in said
    assert "rank 1: samples 33, 35, 37, 39\n" in said
    assert "rank 0:" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task=gradient", "loop.max_norm=1"], "step 5: the norm of the gradient is nan, and every loss is finite."),
        (["task=loss", "loop.save_every=5"], "step 5: the loss is inf"),
    ],
)
def test_on_one_process_the_next_step_tells(train: Any, more: list[str], said: str) -> None:
    broken = train("run", *RARE, "loop.save_every=null", *more, code=1)
    assert said in broken.out
    assert broken.lines("train") == []
    assert saved(broken) == []


def test_numbers_of_an_accelerator_are_looked_at_now_and_then_and_none_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy from there takes its time; the clock is set by hand."""
    now, one = [0.0], torch.tensor(1.0)
    monkeypatch.setattr(nonfinite_check, "perf_counter", lambda: now[0])
    afar: Any = nonfinite_check.NonFiniteCheckOnDevice(Ranks(), torch.device("cpu"))
    seen = []
    for step in range(1, 9):  # the second one is bad; the first look is at step 1, the next one 0.05 s later, at step 5
        now[0] = step / 64
        seen.append(afar.has_found())
        batch = SimpleNamespace(indices=torch.tensor([step, step + 100]))
        afar.record(step, [batch], INF if step == 2 else one, one)
    assert seen == [False] * 5 + [True] * 3
    with pytest.raises(FloatingPointError, match=r"step 2: the loss is inf.*\n.*\n.*samples 2, 102"):
        afar.check(True)


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    """As older versions wrote them; what stands for no number on purpose is fine."""
    checkpoints = CheckpointManager(tmp_path, Ranks())
    fine = {"w": torch.ones(3), "mask": INF.expand(3), "optimizer/w/exp_avg": torch.ones(3), "optimizer/w/d": INF}
    checkpoints.save(1, fine, {})
    checkpoints.save(2, {**fine, "w": torch.tensor([1.0, math.nan, 2.0])}, {})
    checkpoints.save(3, {**fine, "optimizer/w/exp_avg": INF.expand(3)}, {})
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1


# Going on without a step.


STRATEGIES: list[Any] = [
    (1, "single", ["precision=fp16", "ema.decay=0.9"]),
    (1, "single", ["optimizer.fused=false", "ema.decay=0.9"]),
    (2, "ddp", ["loop.micro_batches=2"]),
    (2, "zero1", []),
    (2, "fsdp", ["ema.decay=0.9"]),
    (2, "tp", ["model.norm=false"]),
    (2, "pp", ["loop.micro_batches=2", "model.norm=false"]),
]


@pytest.mark.parametrize(("ranks", "strategy", "more"), quickly(STRATEGIES, STRATEGIES[1], STRATEGIES[2]))
def test_a_step_that_is_left_out_has_taught_nothing(
    processes: Processes, train: Any, ranks: int, strategy: str, more: list[str]
) -> None:
    words = ["task=fine", f"strategy={strategy}", *more]
    skipping = train("run", *words, "data.poisoned=[37]", "loop.on_nonfinite=skip", ranks=ranks)
    by_hand = train("hand", *words, "data.without=[5]", "loop.steps=9", ranks=ranks)
    # a step with a broken sample teaches as much as no step at all: not its update, and not the averages of BatchNorm
    left, right = everything(skipping.folder), everything(by_hand.folder)
    assert int(left.pop("scaler/left_out")) == 1
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_each_step_that_is_left_out_is_told_with_its_samples_and_a_resumed_run_leaves_out_the_same(train: Any) -> None:
    words = ["task=fine", "data.poisoned=[37,58]", "loop.on_nonfinite=skip", "loop.log_every=4", "loop.save_every=3"]
    done = train("run", *words)
    log = (done.folder / "logs/rank-0.log").read_text()
    said = "step {0}: the loss is nan; its update is left out. Read were:\n  step {0}, rank 0: samples {1}"
    for step, samples in ((5, "32, 33, 34, 35, 36, 37, 38, 39"), (8, "56, 57, 58, 59, 60, 61, 62, 63")):
        assert log.count(said.format(step, samples)) == 1
    assert "left out    2 steps whose loss or gradient was not finite" in log
    # a line is of all steps since the one before that count
    whole = done.lines("train")
    assert [line["step"] for line in whole] == [4, 8, 10]
    assert all(0 < line["loss_mean"] < 10 for line in whole)
    assert math.isnan(float(whole[1]["loss"]))
    # killed after the save of step 6: the steps after it are the same to the bit, and one of the two is counted anew
    before = everything(done.folder)
    for step in (9, 10):
        shutil.rmtree(done.folder / "checkpoints" / f"step-{step:08d}")
    status = done.folder / "status.json"
    status.write_text(status.read_text().replace("completed", "running"))
    again = train("run", *words).lines("train")
    assert [line["step"] for line in again] == [4, 8, 10]
    assert again[2]["loss_hex"] == whole[2]["loss_hex"]
    assert all(torch.equal(one, before[name]) for name, one in everything(done.folder).items())
    assert int(before["scaler/left_out"]) == 2


def test_too_many_steps_that_are_left_out_end_the_run(train: Any) -> None:
    words = ["task=fine", "loop.on_nonfinite=skip", "loop.save_every=null", f"data.poisoned={[*range(7, 160, 40)]}"]
    said = train("run", *words, "loop.steps=200", code=1).out  # 1 of 5 steps
    assert "step 51: the loss is nan. More than 10 of 100 steps would be left out." in said
    assert "step 51, rank 0: samples 80, 81, 82, 83, 84, 85, 86, 87\n" in said
