"""Tensor parallelism's words before it starts, and its watch over what is not cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.strategies.networks import Net, Plain
from tests.strategies.runs import Train
from trainer import Plan, Refusal, Task
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


class Drifting(Net):
    """One rank's norm goes its own way."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dist.is_initialized():
            self.norm.weight.data[0] += 0.1 * dist.get_rank()
            self.head.weight.data[0] += 1e-6 * dist.get_rank()  # what rounding adds up to is no drift
        return super().forward(x)


def test_parameters_outside_the_plan_are_watched(train: Train) -> None:
    said = train.refused("strategy=tp precision=fp32", 2, code=1, model=Drifting)
    assert "norm.weight" in said
    assert "head" not in said.partition("norm.weight")[2].partition("\n")[0]


class Off(torch.autograd.Function):
    """The identity, whose gradient is off by so much of itself on the second rank: as of kernels with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, off: float) -> Tensor:
        ctx.off = off * (dist.get_rank() if dist.is_initialized() else 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (1 + ctx.off), None


class Rounded(Net):
    off = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return Off.apply(super().forward(x), self.off)


class Apart(Rounded):
    off = 1.0


def test_rounding_moves_no_copy_away_from_the_others_and_stops_no_save(train: Train) -> None:
    """Ranks compare what they hold at each line, and before each save."""
    seen, alone = train("precision=fp32 strategy=tp", 2, model=Rounded), train("precision=fp32", model=Rounded)
    assert seen.losses == pytest.approx(alone.losses, abs=1e-3)


def test_gradients_that_are_no_rounding_apart_are_found_before_anything_is_learned(train: Train) -> None:
    said = train.refused("strategy=tp precision=fp32", 2, code=1, model=Apart)
    assert "gradients of parameters outside the tensor plan differ" in said
    assert "head.weight" in said


@pytest.mark.parametrize("fields", [{}, {"replicate": 2, "tensor": 2}])
def test_native_dropout_is_refused(fields: dict[str, Any]) -> None:
    """Also of a network that has none."""
    strategy = TP(machine=Machine(device="cpu", dropout="native"), **fields)
    with pytest.raises(Refusal, match=r"loop\.dropout=native: tensor ranks .*; loop\.dropout=sample, the default"):
        strategy.check(Plain(), Net(), 4)
