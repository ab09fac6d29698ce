"""A step as one graph has the numbers of the step as it is. Graphs run as Inductor would get them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from tests.commands import SMALL
from tests.inside import here
from tests.strategies.test_order import NETWORKS, SINGLE, train
from tests.strategies.toys import CLASSES, WIDTH, Plain
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.compile import Compiler, CompileSettings
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.strategies.single import Single

# torch silences it by replacing the function that shows warnings, which an error passes by
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were made."""
    made: list[Any] = []

    def compile_graph(self: Compiler, graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(Compiler, "_compile_graph", compile_graph)
    return made


@pytest.mark.long  # imports the compiler
@pytest.mark.parametrize("network", ["small", "normed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_its_numbers_are_those_of_the_step_as_it_is(network: str, optimizer: str, graphs: list[Any]) -> None:
    case = SINGLE.but(network=network, micro_batches=1, optimizer=optimizer)
    plain, compiled = train(Launch(), case), train(Launch(), case.but(compile="step"))
    assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-10)
    assert compiled["evaluation"] == pytest.approx(plain["evaluation"], abs=1e-10)
    for name, weight in plain["weights"].items():
        gap = torch.tensor(compiled["weights"][name]) - torch.tensor(weight)
        assert gap.abs().max() < 1e-10, name
    assert graphs


class Scaled(nn.Linear):
    """A learned temperature: a parameter of shape ()."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_a_parameter_that_is_one_number_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "scaled", Scaled)
    case = SINGLE.but(network="scaled", micro_batches=1, optimizer="adamw", precision="fp32")
    plain, compiled = train(Launch(), case), train(Launch(), case.but(compile="step"))
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert compiled["weights"]["scale"] == pytest.approx(plain["weights"]["scale"], rel=1e-5) != 2.0


class Sometimes(nn.Module):
    """Uses one of its layers for some data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.rarely(x) if x.sum() > 0 else self.often(x)


def test_what_cannot_be_one_graph_is_refused() -> None:
    strategy = Single(machine=Machine(device="cpu", compile=CompileSettings("step")))
    with pytest.raises(Refusal, match=r"loop\.micro_batches=2: .* has one micro-batch"):
        strategy.refuse_compile(2)
    with pytest.raises(Refusal, match=r"activation_offload .* use compile\.mode=default"):
        Single(machine=strategy.machine, activation_offload=True).refuse_compile(1)
    with pytest.raises(Refusal, match=r"goes without strategy\.compress: .* in one message"):
        DDP(machine=strategy.machine, compress="bf16").refuse_compile(1)
    for network, make, said in (
        (NETWORKS["small"](), lambda groups: torch.optim.RMSprop(groups), "not RMSprop; use compile.mode=default"),
        (Sometimes(), lambda groups: torch.optim.SGD(groups, 0.1), "not sure .* rarely"),
    ):
        with strategy:
            example = torch.randn(2, WIDTH), torch.tensor([0, 1])
            model = strategy.build(Plain(), network.double(), example)
            with pytest.raises(Refusal, match=said):
                model.optimizer(make, [{"params": list(network.parameters())}])


def test_weights_of_a_task_that_could_learn_are_refused() -> None:
    task, network = Plain(), NETWORKS["small"]().double()
    task.teacher = nn.Linear(CLASSES, CLASSES)  # type: ignore[attr-defined]
    with Single(machine=Machine(device="cpu", compile=CompileSettings("step"))) as strategy:
        model = strategy.build(task, network, (torch.randn(2, WIDTH), torch.tensor([0, 1])))
        with pytest.raises(Refusal, match=r"teacher\.weight, teacher\.bias: .* requires_grad_\(False\)"):
            model.optimizer(lambda groups: torch.optim.SGD(groups, 0.1), [{"params": list(network.parameters())}])
        task.teacher.requires_grad_(False)  # type: ignore[attr-defined]
        model.optimizer(lambda groups: torch.optim.SGD(groups, 0.1), [{"params": list(network.parameters())}])


def test_a_comparison_inside_of_a_graph_is_refused() -> None:
    with pytest.raises(Refusal, match=r"one graph shows nothing in between; use compile\.mode=default"):
        here(*SMALL, "job=verify", "compile.mode=step", "loop.micro_batches=1")
