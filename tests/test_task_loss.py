"""What a task returns as its loss: one number, or parts that add up to it; and weights that it holds itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.options import options
from tests.run import Finished, run
from trainer import Task


class Given(Task):
    """What it is told to return."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def loss(self, output: Tensor, target: Tensor) -> Any:
        one = functional.cross_entropy(output, target)
        return {
            "parts": {"a": one, "b": 2 * one},
            "vector": output[:, 0],
            "None": None,
            "nothing": {},
            "a float": {"a": one, "b": 0.0},
            "loss": {"loss": one, "a": one},
            "lr": {"lr": one, "a": one},
        }[self.kind]


class Weighing(Task):
    """Losses whose weights are learned, after Kendall, Gal, Cipolla (2018)."""

    def __init__(self) -> None:
        self.log_variances = nn.ParameterDict({"entropy": nn.Parameter(torch.zeros(())), "size": torch.zeros(())})

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        parts = {"entropy": functional.cross_entropy(output, target), "size": output.square().mean()}
        return sum((parts[name] * (-x).exp() + x for name, x in self.log_variances.items()), torch.zeros(()))


class Measured(Task, nn.Module):
    """A network inside a task, which is a module itself."""

    def __init__(self, frozen: bool = False, aside: bool = False) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(1)
        self.measure = nn.Linear(10, 10).requires_grad_(not frozen)
        self.aside = aside

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        return network(inputs)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.aside):
            measured = self.measure(output.detach() if self.aside else output)
        return functional.cross_entropy(output, target) + 0.1 * (measured - output).square().mean()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Finished]:
    own = [*options(tmp_path, Given, Weighing, Measured), "loop.log_every=1", "loop.global_batch=24", "model=mlp"]
    own += ["model.width=16", "model.depth=1", "loop.steps=2", "loop.eval_every=null"]

    def train(name: str, *words: str, ranks: int = 1, code: int = 0) -> Finished:
        how: Any = "here" if ranks == 1 else "group"
        return run([*own, f"run.dir={name}", *words], ranks, how, place=tmp_path, code=code)

    return train


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("vector", "what it returns is of shape (96,)"),
        ("None", "what it returns is of type NoneType"),
        ("nothing", "what it returns is of type dict"),
        ("a float", "its part b is of type float"),
        ("loss", "a part may not be called loss"),
        ("lr", "a part may not be called lr, as another number of a training line is"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(train: Any, kind: str, said: str) -> None:
    done = train("run", "task=given", f"task.kind='{kind}'", code=2)
    assert f"Task.loss: {said}" in done.out  # of the rehearsal of an evaluation
    assert done.lines("train") == []


def test_parts_add_up_and_stand_in_a_line(train: Any) -> None:
    for line in train("run", "task=given", "task.kind=parts").lines("train"):
        assert line["b"] == pytest.approx(2 * line["a"], rel=1e-6)
        assert line["loss"] == pytest.approx(3 * line["a"], rel=1e-6)


def test_parameters_of_a_task_are_refused_before_the_run(train: Any, tmp_path: Path) -> None:
    said = train("run", "task=weighing", code=2).out
    assert "Weighing has parameters of its own, log_variances.entropy, log_variances.size: " in said
    assert not (tmp_path / "run").exists()


def test_a_network_in_a_task_may_not_learn(train: Any) -> None:
    done = train("refused", "task=measured", code=2)
    assert "task: weights that Measured holds get gradients, measure.weight, measure.bias: " in done.out
    assert not [*done.folder.glob("checkpoints/*")]
    for word in ("frozen", "aside"):
        assert [*train(word, "task=measured", f"task.{word}=true").folder.glob("checkpoints/*2")]
