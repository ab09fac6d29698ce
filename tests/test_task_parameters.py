"""Weights inside a task: what is to learn is refused, what is not to learn works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.inside import here, product
from tests.processes import Processes
from trainer import Task
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal


class Weighted(Task):
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
def words(tmp_path: Path) -> list[str]:
    """A small run with these classes as options of `task`."""
    (tmp_path / "conf/task").mkdir(parents=True)
    for name in ("weighted", "measured"):
        (tmp_path / f"conf/task/{name}.yaml").write_text(f"_target_: tests.test_task_parameters.{name.title()}\n")
    brief = ["trust=[tests]", "loop.log_every=1", "loop.global_batch=24", "loop.eval_every=null", "model.width=16"]
    return ["--config-dir", "conf", *brief, "model=mlp", "model.depth=1", "loop.epochs=null", "loop.steps=2"]


def refused(launch: Launch, place: Path, words: list[str]) -> str:
    """What a run is refused with; empty where it is not."""
    try:
        assert product(launch, place, words) == 0
    except Refusal as refusal:
        return str(refusal)
    return ""


def test_parameters_of_a_task_are_refused_before_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        Refusal, match=r"Weighted has parameters of its own, log_variances.entropy, log_variances.size: "
    ):
        here(*words, "task=weighted", "run.dir=run")
    assert not Path("run").exists()


@pytest.mark.long
def test_a_network_in_a_task_may_not_learn(processes: Processes, words: list[str], tmp_path: Path) -> None:
    words = [*words, "task=measured"]
    own = ["strategy=pp", "loop.micro_batches=2", "run.dir=refused"]
    said = processes.run(2, refused, tmp_path, [*words, *own])
    assert len({*said}) == 1
    assert said[0].startswith("task: weights that Measured holds get gradients, measure.weight, measure.bias: ")
    assert not list(tmp_path.glob("refused/checkpoints/*"))
    for word in ("frozen", "aside"):
        assert processes.run(2, refused, tmp_path, [*words, "strategy=fsdp", f"+task.{word}=true", f"run.dir={word}"])
        assert list(tmp_path.glob(f"{word}/checkpoints/*2"))
