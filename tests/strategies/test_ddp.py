"""What only DDP has: its fields, and its words when a parameter gets no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import CLASSES, NETWORKS, WIDTH, Activated, Case, Plain, run
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine


class Forgetful(nn.Module):
    """A network with a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, CLASSES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Median(nn.BatchNorm1d):
    """Takes statistics of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.median(0).values


class Following(nn.Module):
    """Each forward in training moves a frozen layer towards one that learns, as MoCo's key encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.key.weight.lerp_(self.query.weight, 0.1)
        return self.query(x) + self.key(x)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.requires_grad_(False)


def with_network(launch: Launch, kind: type[nn.Module], case: Case) -> Any:
    NETWORKS["special"] = kind
    try:
        return run(launch, case.but(network="special"))
    except Refusal as refusal:
        return str(refusal)


def test_parameters_without_a_gradient_are_named_with_the_field_to_set(processes: Processes) -> None:
    for said in processes.run(2, with_network, Forgetful, Case("ddp")):
        assert "idle.weight, idle.bias" in said
        assert "strategy.find_unused_parameters=true" in said


def test_a_frozen_parameter_that_a_forward_moves_begins_where_it_was(processes: Processes) -> None:
    (reference,) = processes.run(1, with_network, Following, Case())
    for rank in processes.run(2, with_network, Following, Case("ddp")):
        assert max(abs(a - b) for a, b in zip(rank["losses"], reference["losses"], strict=True)) < 1e-6


def test_with_that_field_they_train(processes: Processes) -> None:
    (reference,) = processes.run(1, with_network, Forgetful, Case())
    case = Case("ddp", {"find_unused_parameters": True}, micro_batches=2)
    for rank in processes.run(2, with_network, Forgetful, case):
        assert max(abs(a - b) for a, b in zip(rank["losses"], reference["losses"], strict=True)) < 1e-3


def test_a_batch_norm_whose_statistics_cannot_be_synchronised_is_refused() -> None:
    network = nn.Sequential(Activated(3), Median(3))
    DDP(machine=Machine()).check(Plain(), network, 2)
    DDP(machine=Machine(), sync_bn=True).check(Plain(), network[:1], 2)
    with pytest.raises(Refusal, match=r"strategy.sync_bn=true: 1 is a Median, whose forward does not call torch's"):
        DDP(machine=Machine(), sync_bn=True).check(Plain(), network, 2)


def test_nothing_to_train_is_refused(processes: Processes) -> None:
    assert all("no trainable parameter" in said for said in processes.run(2, with_network, Frozen, Case("ddp")))


@pytest.mark.parametrize(
    ("fields", "close"),
    [
        ({"static_graph": True}, 1e-3),
        ({"bucket_mb": 1}, 1e-3),
        ({"compress": "bf16"}, 0.05),
        ({"compress": "fp16"}, 0.05),
    ],
)
def test_every_field_trains_to_the_same_curve(processes: Processes, fields: dict[str, Any], close: float) -> None:
    (reference,) = processes.run(1, run, Case())
    for rank in processes.run(2, run, Case("ddp", fields, micro_batches=2)):
        assert max(abs(a - b) for a, b in zip(rank["losses"], reference["losses"], strict=True)) < close


@pytest.mark.parametrize(
    ("strategy", "precision"),
    quickly([(word, of) for word in ("ddp", "tp") for of in ("bf16", "fp16")], ("ddp", "fp16"), ("tp", "bf16")),
)
def test_reduced_precision_trains_alike_on_all_ranks(processes: Processes, precision: str, strategy: str) -> None:
    one, other = processes.run(2, run, Case(strategy, precision=precision))
    assert one["losses"] == other["losses"]
    assert one["losses"][-1] < one["losses"][0]
    assert one["weights"] == other["weights"]
    assert all(torch.tensor(one["norms"]).isfinite()) or precision == "fp16"
    assert ("scaler/scale" in one["state"]) == (precision == "fp16")
