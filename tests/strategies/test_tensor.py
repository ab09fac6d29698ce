"""Tensor parallelism's words before it starts, and its watch over what is not cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.processes import Processes
from tests.strategies.toys import CLASSES, Net, Plain, Rows, ToyData, make_optimizer, whole
from trainer import Plan, Task
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.strategies.machine import Machine
from trainer.strategies.tp import TP


class Planned(Net):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def plan(self) -> Plan:
        return self._plan


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4, 4, sparse=True)


@pytest.mark.parametrize(
    ("network", "degree", "said"),
    [
        (nn.Linear(3, 3), 2, ["Linear has no tensor-parallel plan", "strategy=ddp"]),
        (Planned(Plan(tensor={"upp": ColwiseParallel()})), 2, ["'upp' matches no module", "did you mean 'up'"]),
        (Planned(Plan(tensor={"up": ColwiseParallel()})), 5, ["up.out_features 24 / 5", "1, 2, 3, 4, 6"]),
        (Planned(Plan(tensor={"down": RowwiseParallel()})), 7, ["down.in_features 24 / 7", "strategy=ddp"]),
        (Planned(Plan(tensor={"norm": ColwiseParallel()})), 2, ["norm, a LayerNorm", "only Linear and Embedding"]),
        (Planned(Plan(tensor={"up": ColwiseParallel()}, divisible={"heads": 3})), 2, ["3 heads / 2", "1, 3"]),
        (Sparse(), 2, ["strategy=tp sends dense gradients", "bag"]),
    ],
)
def test_what_cannot_be_cut_is_refused_before_it_starts(network: nn.Module, degree: int, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        TP().check(Task(), network, degree)
    assert all(part in str(refused.value) for part in said), str(refused.value)


def test_wildcards_stand_within_one_level() -> None:
    deep = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    TP().check(_Says({"*.0": ColwiseParallel()}), deep, 2)
    with pytest.raises(Refusal, match="matches no module"):
        TP().check(_Says({"*.*.0": ColwiseParallel()}), deep, 2)


class _Says(Task):
    """A task that says how a network of others is cut."""

    def __init__(self, styles: dict[str, Any]) -> None:
        self._styles = styles

    def plan(self, network: nn.Module) -> Plan:
        return Plan(tensor=self._styles)


def test_processes_that_make_up_no_whole_copies_are_refused_with_degrees_that_do() -> None:
    with pytest.raises(Refusal, match=r"4 processes / \(strategy.tensor 3 = 3\) is not whole; nearest: .*tensor=4, or"):
        TP(replicate=None, tensor=3).data_ranks(4)


def drifting(launch: Launch) -> tuple[bool, str]:
    """Build from unequal weights, then let one rank's norm drift."""
    torch.manual_seed(launch.rank)  # a network that was not seeded: rank 0's weights must become everyone's
    with TP(machine=Machine(launch=launch, device="cpu")) as strategy:
        network = Net()
        parallel_model = strategy.build(Task(), network, None)
        first = network.head.weight.detach().clone()
        shared = strategy.world.all_gather(first)
        with torch.no_grad():
            network.norm.weight[0] += 0.1 * launch.rank
            network.head.weight[0] += 1e-6 * launch.rank  # what rounding adds up to is no drift
        try:
            parallel_model.state(
                parallel_model.optimizer(
                    torch.optim.SGD, [{"params": list(parallel_model.network.parameters()), "lr": 0.1}]
                )
            )
        except RuntimeError as error:
            return torch.equal(shared[0], shared[1]), str(error)
    return False, ""


def test_parameters_outside_the_plan_are_made_equal_and_watched(processes: Processes) -> None:
    for equal, said in processes.run(2, drifting):
        assert equal
        assert "norm.weight" in said
        assert "head" not in said


class Rounding(torch.autograd.Function):
    """The identity, whose gradient is off by so much of itself on the second rank: as of kernels with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, off: float) -> Tensor:
        ctx.off = off
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (1 + ctx.off * dist.get_rank()), None


class Uneven(Net):
    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off
        self.last = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(super().forward(x))
        if self.training:
            with torch.no_grad():
                self.last.running_mean.data += 1e-7 * dist.get_rank()
        return Rounding.apply(y, self.off)


def apart(launch: Launch, off: float) -> tuple[list[list[float]], str]:
    """The weights outside the plan after some steps whose gradients are not the same everywhere, or what was said."""
    with TP(machine=Machine(launch=launch, device="cpu")) as strategy:
        torch.manual_seed(3)
        stream = TrainLoader(ToyData(), Rows(96, 1), strategy.slice, 24, 1, LoaderOptions())
        parallel_model = strategy.build(Plain(), Uneven(off), stream.example())
        optimizer = parallel_model.optimizer(
            make_optimizer("adamw"), [{"params": list(parallel_model.network.parameters())}]
        )
        try:
            for step, batches in enumerate(stream.epoch(0)):
                parallel_model.forward_backward(batches, step)
                parallel_model.optimizer_step(optimizer, 1.0)
            parallel_model.settle()
            state = parallel_model.state(optimizer)
        except RuntimeError as error:
            return [], f"step {step}: {error}"
        names = ("norm.weight", "head.bias", "down.bias", "last.running_mean", "optimizer/head.bias/exp_avg")
        return [whole(state[name]) for name in names], ""


def test_rounding_moves_no_copy_away_from_the_others_and_stops_no_save(processes: Processes) -> None:
    (one, _), (other, said) = processes.run(2, apart, 1e-6)
    assert not said
    assert one == other


def test_gradients_that_are_no_rounding_apart_are_found_before_anything_is_learned(processes: Processes) -> None:
    for _, said in processes.run(2, apart, 1.0):
        assert said.startswith("step 0: gradients of parameters outside the tensor plan differ")
        assert "head.weight" in said


@pytest.mark.parametrize("fields", [{}, {"replicate": 2, "tensor": 2}])
def test_native_dropout_is_refused(fields: dict[str, Any]) -> None:
    """Also of a network that has none."""
    strategy = TP(machine=Machine(device="cpu", dropout="native"), **fields)
    with pytest.raises(Refusal, match=r"loop\.dropout=native: tensor ranks .*; loop\.dropout=sample, the default"):
        strategy.check(Plain(), Net(), 4)
