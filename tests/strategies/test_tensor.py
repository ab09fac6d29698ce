"""Tensor parallelism's words before it starts, and its watch over what is not cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.strategies.networks import CLASSES, Net, Plain
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


class Says(Task):
    """A task that says how a network of others is cut."""

    def __init__(self, styles: dict[str, Any]) -> None:
        self._styles = styles

    def plan(self, network: nn.Module) -> Plan:
        return Plan(tensor=self._styles)


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
    TP().check(Says({"*.0": ColwiseParallel()}), deep, 2)
    with pytest.raises(Refusal, match="matches no module"):
        TP().check(Says({"*.*.0": ColwiseParallel()}), deep, 2)


def test_processes_that_make_up_no_whole_copies_are_refused_with_degrees_that_do() -> None:
    with pytest.raises(Refusal, match=r"4 processes / \(strategy.tensor 3 = 3\) is not whole; nearest: .*tensor=4, or"):
        TP(replicate=None, tensor=3).data_ranks(4)


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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Rounding(torch.autograd.Function):
    """The identity, whose gradient is off by so much of itself on the second rank: as of kernels with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, off: float) -> Tensor:
        ctx.off = off
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (1 + ctx.off * _rank()), None


class Uneven(Net):
    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off
        self.last = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(super().forward(x))
        if self.training:
            with torch.no_grad():
                self.last.running_mean.data += 1e-7 * _rank()
        return Rounding.apply(y, self.off)


class Rounded(Uneven):
    def __init__(self) -> None:
        super().__init__(1e-6)


class Apart(Uneven):
    def __init__(self) -> None:
        super().__init__(1.0)


def test_rounding_moves_no_copy_away_from_the_others_and_stops_no_save(train: Train) -> None:
    """Ranks compare what they hold at each line, and before each save."""
    seen, alone = (
        train(f"precision=fp32 {words}", ranks, model=Rounded) for words, ranks in (("strategy=tp", 2), ("", 1))
    )
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
