"""What only DDP has: its fields, and its words when a parameter gets no gradient."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.run import far
from tests.strategies.networks import CLASSES, WIDTH, Activated, Plain
from tests.strategies.runs import Train
from trainer import Refusal
from trainer.strategies.ddp import DDP


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


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.requires_grad_(False)


class Counting(nn.Linear):
    """It counts its calls in Python, and learns less with each."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + self.calls)


def test_a_trial_forward_leaves_no_count_in_python(train: Train) -> None:
    words = "loop.steps=4 loop.micro_batches=2"
    seen = train(f"strategy=ddp {words}", 2, model=Counting)
    assert far(seen.losses, train(words, model=Counting).losses) < 1e-10


def test_parameters_without_a_gradient_are_named_with_the_field_to_set_and_train_with_it(train: Train) -> None:
    said = train.refused("strategy=ddp", 2, model=Forgetful)
    assert "idle.weight, idle.bias" in said
    assert "strategy.find_unused_parameters=true" in said
    words = "strategy=ddp strategy.find_unused_parameters=true loop.micro_batches=2"
    assert far(train(words, 2, model=Forgetful).losses, train(model=Forgetful).losses) < 1e-10


def test_what_it_cannot_train_is_refused(train: Train) -> None:
    network = nn.Sequential(Activated(3), Median(3))
    DDP().check(Plain(), network, 2)
    DDP(sync_bn=True).check(Plain(), network[:1], 2)
    with pytest.raises(Refusal, match=r"strategy.sync_bn=true: 1 is a Median, whose forward does not call torch's"):
        DDP(sync_bn=True).check(Plain(), network, 2)
    assert "no trainable parameter" in train.refused("strategy=ddp", 2, model=Frozen)


@pytest.mark.parametrize(
    ("fields", "close"),
    [
        ("strategy.static_graph=true strategy.bucket_mb=1", 1e-10),
        ("strategy.compress=bf16 precision=fp32", 0.05),
        ("strategy.compress=fp16 precision=fp32", 0.05),
    ],
)
def test_every_field_trains_to_the_same_curve(train: Train, fields: str, close: float) -> None:
    seen, alone = train(f"strategy=ddp loop.micro_batches=2 {fields}", 2), train()
    assert far(seen.losses, alone.losses) < close
    assert "fp32" not in fields or far(seen.norms, alone.norms) > 1e-5  # what was sent was rounded
