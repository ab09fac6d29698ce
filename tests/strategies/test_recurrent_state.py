"""State that passes from batch to batch: the same whoever has which rows, in one piece or in several."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.commands import curve, far, lines
from tests.inside import product
from tests.processes import Processes
from tests.test_labs import train
from trainer.data.loader import Batch
from trainer.data.rng import seed_all
from trainer.launch.rendezvous import Launch
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.strategies.machine import Machine
from trainer.strategies.recurrent_state import RecurrentState
from trainer.strategies.single import Single

pytestmark = pytest.mark.slow

# eight streams of seven windows: an epoch has seven steps, and the evaluation three batches
TEXT = ["data.numbers=300", "loop.global_batch=8", "loop.eval_batch=2", "loop.max_norm=null", "loop.log_every=1"]
LENGTH = ["schedule=constant", "optimizer=adam", "optimizer.lr=3e-3", "loop.epochs=null", "loop.eval_every=7"]


def read(launch: Launch, folder: Path, steps: int, *words: str) -> Any:
    return train(launch, "recurrent", folder, *TEXT, *LENGTH, f"loop.steps={steps}", *words)


def losses_of_a_loop(steps: int) -> tuple[list[float], list[float]]:
    """Truncated backpropagation as people write it: the memory is detached, and None where an epoch begins."""
    lab = import_module("tests.labs.recurrent.lab")
    data = lab.Counted(300, 16, 8, 2)
    seed_all(0)
    reader = lab.Reader(32, 2).double()
    optimizer = torch.optim.Adam(reader.parameters(), lr=3e-3)
    losses, evaluations = [], []
    memory: Any = None
    for step in range(steps):
        memory = {name: x.detach() for name, x in memory.items()} if step % 7 else None
        text, following = data.windows[[7 * stream + step % 7 for stream in range(8)]]
        loss, memory = loss_of(reader, text, following, memory)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 7 == 6 or step + 1 == steps:
            own, found = None, []
            for at in range(3):
                text, following = data.rest[[at, 3 + at]]
                loss, own = loss_of(reader, text, following, own)
                found.append(loss.item())
            evaluations.append(sum(found) / 3)
    return losses, evaluations


def loss_of(reader: Any, text: torch.Tensor, following: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any]:
    output = reader(text, memory)
    return cross_entropy(output["scores"].flatten(0, 1), following.flatten()), output["memory"]


def test_a_memory_passes_as_in_a_loop_that_detaches_it(tmp_path: Path) -> None:
    assert read(Launch(), tmp_path / "run", 12, "strategy=single", "precision=fp64") == 0
    losses, evaluations = losses_of_a_loop(12)
    assert far(curve(tmp_path / "run"), losses) < 1e-9
    assert far([line["loss"] for line in lines(tmp_path / "run", "eval")], evaluations) < 1e-9


class Sum(Task):
    """What passes on is the sum of a row so far."""

    def forward(self, network: Any, inputs: Any, targets: Any, carried: Any = None) -> Any:
        return inputs + carried["sum"] if carried else inputs

    def carry(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": output}

    def loss(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        return output.mean()


def test_rows_of_a_step_that_is_left_out_pass_on_what_they_were_given() -> None:
    task = Sum()
    with Single(machine=Machine(device="cpu")) as place:
        carried = RecurrentState(task, place)

        def step(row: list[float], continues: bool) -> list[float]:
            batch = Batch(torch.tensor(row), None, torch.arange(2), range(2), 2, continues)
            carried.wrap_forward(partial(task.forward, None), batch, training=True)(batch.inputs, None)
            carried.undo_step(torch.tensor(not torch.tensor(row).isfinite().all()))
            return carried.state()["carried/sum"].tolist()

        assert [step([1, 2], False), step([1, math.nan], True), step([1, 1], True)] == [[1, 2], [1, 2], [2, 3]]
        assert [step([1, math.nan], False), step([4, 5], True)] == [[0, 0], [4, 5]]  # an epoch begins from nothing


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(1, ["single"], marks=pytest.mark.long),
        (2, ["ddp", "loop.micro_batches=2"]),
        pytest.param(2, ["fsdp"], marks=pytest.mark.long),
    ],
)
def test_a_resume_within_an_epoch_changes_no_bit(
    processes: Processes, tmp_path: Path, size: int, words: list[str]
) -> None:
    own = [f"strategy={words[0]}", *words[1:]]
    for folder, bounds in (("whole", [12]), ("parts", [5, 12])):
        for steps in bounds:
            assert processes.run(size, read, tmp_path / folder, steps, *own) == [0] * size
    assert curve(tmp_path / "parts", "loss_hex") == curve(tmp_path / "whole", "loss_hex")


@pytest.mark.long
def test_other_ranks_and_micro_batches_go_on_with_the_same_rows(processes: Processes, tmp_path: Path) -> None:
    double = "precision=fp64"
    assert read(Launch(), tmp_path / "whole", 12, "strategy=single", double) == 0
    for steps, size, words in (
        (3, 1, ["single", "loop.micro_batches=4"]),
        (5, 2, ["ddp", "loop.micro_batches=2"]),
        (9, 3, ["fsdp", "loop.uneven=true"]),
        (11, 2, ["zero1"]),
        (12, 1, ["single"]),
    ):
        said = processes.run(size, read, tmp_path / "parts", steps, double, f"strategy={words[0]}", *words[1:])
        assert said == [0] * size
    assert far(curve(tmp_path / "parts"), curve(tmp_path / "whole")) < 1e-9


def test_a_pipeline_refuses_what_its_last_stage_leaves(processes: Processes, tmp_path: Path) -> None:
    for said in processes.run(2, read, tmp_path / "run", 2, "strategy=pp", "loop.micro_batches=2"):
        assert "NextByte carries a state" in said
        assert "strategy=fsdp and strategy=ddp" in said
    assert not (tmp_path / "run").exists()


# Sample i is the number i; the rows of a batch add theirs to what the rows before have left.
SUMS = """
import torch
from torch import nn
from trainer import Data, Task


class Numbers(Data):
    def train(self):
        return self._first(20)

    def evaluation(self):
        return self._first(11)

    def order(self, epoch, generator):
        return torch.arange(20)

    def _first(self, count):
        numbers = torch.arange(float(count))
        return torch.utils.data.TensorDataset(numbers, numbers)


class Strangers(Numbers):
    order = Data.order


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Sums(Task):
    def __init__(self, shape: str = "right"):
        self.shape = shape

    def forward(self, network, inputs, targets, carried=None):
        return network(inputs if carried is None else inputs + carried["sum"])

    def carry(self, output):
        return {"sum": {"right": output, "turned": output[None], "nested": (output,)}[self.shape]}

    def loss(self, output, target):
        return output.mean()
"""


def add_up(launch: Launch, home: Path, *words: str) -> Any:
    with patch.object(sys, "path", [str(home), *sys.path]):
        chosen = ["model=scale", "data=numbers", "task=sums", "precision=fp64", "optimizer=sgd", "optimizer.lr=1e-30"]
        length = ["loop.steps=6", "loop.global_batch=5", "loop.eval_batch=5", "loop.log_every=1", "loop.eval_every=5"]
        try:
            return product(launch, home, ["--config-dir", "sumslab/conf", *chosen, *length, *words])
        except (Refusal, ValueError) as error:
            return str(error)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    files = {"task.py": SUMS, "conf/model/scale.yaml": "_target_: sumslab.task.Scale\n"}
    files |= {"conf/data/numbers.yaml": "_target_: sumslab.task.Numbers\n"}
    files |= {"conf/data/strangers.yaml": "_target_: sumslab.task.Strangers\n"}
    files |= {"conf/task/sums.yaml": "_target_: sumslab.task.Sums\nshape: right\n"}
    for name, text in files.items():
        (tmp_path / "sumslab" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sumslab" / name).write_text(text)
    return tmp_path


def left_by(sample: int) -> int:
    """The sum that a row has after this sample: of it, and of those five, ten … before it."""
    return sum(range(sample % 5, sample + 1, 5))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(1, ["single", "loop.micro_batches=2"], marks=pytest.mark.long),  # three samples and two
        (3, ["ddp"]),  # two, two and one; the last batch of the evaluation has one sample for three ranks
        pytest.param(2, ["fsdp", "loop.micro_batches=2"], marks=pytest.mark.long),
    ],
)
def test_every_row_gets_its_own_wherever_it_is(processes: Processes, home: Path, size: int, words: list[str]) -> None:
    own = ["loop.uneven=true", "run.dir=run", f"strategy={words[0]}", *words[1:]]
    assert processes.run(size, add_up, home, *own) == [0] * size
    by_step = [sum(left_by(5 * step + row) for row in range(5)) / 5 for step in range(4)]
    assert curve(home / "run") == pytest.approx([*by_step, *by_step[:2]])  # an epoch has four steps
    mean = sum(map(left_by, range(11))) / 11
    assert [line["loss"] for line in lines(home / "run", "eval")] == pytest.approx([mean, mean])


def test_strangers_are_handed_nothing(home: Path) -> None:
    said = add_up(Launch(), home, "run.dir=run", "strategy=single", "data=strangers")
    assert "Sums carries a state from batch to batch, and the samples of Strangers are shuffled" in said
    assert not (home / "run").exists()


@pytest.mark.parametrize(("shape", "said"), [("turned", "of shape (1, 5)"), ("nested", "a tuple")])
def test_a_state_is_tensors_whose_rows_come_first(home: Path, shape: str, said: str) -> None:
    error = add_up(Launch(), home, f"run.dir={shape}", "strategy=single", f"task.shape={shape}")
    assert f"Sums.carry: sum is {said} and must be a tensor with the 5 samples first" in error
