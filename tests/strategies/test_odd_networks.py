"""Networks that one process trains without a thought, and that several could stumble over."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.run import far, quickly
from tests.strategies.networks import CLASSES, WIDTH, Net, Plain
from tests.strategies.runs import SGD, Train, alike
from trainer import Plan


class Routed(Net):
    """A layer that only some samples use: some ranks have no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, some = super().forward(x), x[:, 0] > 1.8
        return y + torch.where(some[:, None], self.rare(x), 0.0) if bool(some.any()) else y


class Buffers(Net):
    """Buffers of every kind, one of them made by the first forward; a parameter of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("mask", torch.bool), ("counts", torch.int16), ("scales", torch.bfloat16)):
            self.register_buffer(name, torch.ones(3, dtype=dtype))
        self.register_buffer("empty", torch.zeros(0))
        self.factor = nn.Parameter(torch.ones(1, 1, 1, CLASSES))  # in a network that convolves nothing

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(1), persistent=False)
        return super().forward(x) * self.get_buffer("cache") * self.factor[0, 0]


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 24)
        self.again.weight = self.up.weight


class Pruned(Net):
    """A weight that a hook computes before each forward of the layer."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.up, "weight", amount=0.5)


class Remembering(nn.Module):
    """x: (B, WIDTH), read as a sequence (B, 6, 2); an LSTM has a list of its weights beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.memory(x.unflatten(1, (6, 2)))
        return self.head(seen[:, -1])


class Sloped(Net):
    """It learns from its own derivative; and freezes a layer for one call, in its first forwards alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.training and self.calls < 5:
            self.up.requires_grad_(False)
            super().forward(x)
            self.up.requires_grad_(True)
        with torch.enable_grad():  # evaluations run without
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return super().forward(x.detach()) + slope.square().sum(1, keepdim=True)

    def plan(self) -> Plan:
        return Plan(shard=("up", "down"))


class Unguarded(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return super().forward(x + slope)


class WholeNumbers(Plain):
    """Weights that are ints and differ between ranks."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        each = nn.functional.cross_entropy(output, target[0], reduction="none") * target[1]
        return each.sum() / target[1].sum().clamp(min=1)

    def weight(self, target: Any) -> int:
        return int(target[1].sum())


class Waves(Net):
    """Complex and real weights side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.wave).real)

    def plan(self) -> Plan:
        return Plan(shard=("up",))  # all others are gathered together


class Idle(Net):
    """A frozen layer, and one that nothing calls: without a gradient it must not even decay."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)
        self.up.requires_grad_(False)


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


UNUSED = "strategy=ddp strategy.find_unused_parameters=true"
# (network, task, processes, words)
QUICK: list[Any] = [
    (Buffers, Plain, 2, "strategy=tp"),
    (Recomputed, Plain, 2, "strategy=ddp"),
    (Routed, Plain, 2, f"{UNUSED} loop.micro_batches=2"),
    (Remembering, Plain, 2, "strategy=fsdp loop.micro_batches=2"),
    (Sloped, Plain, 2, "strategy=fsdp strategy.reshard_after_forward=false loop.micro_batches=2"),
    (Net, WholeNumbers, 2, "strategy=ddp loop.micro_batches=2"),
    (Following, Plain, 2, "strategy=ddp"),  # a frozen parameter that a forward moves begins where it was
]
LONG: list[Any] = [
    (Routed, Plain, 4, "strategy=ddp_tp strategy.tensor=2"),
    (Routed, Plain, 3, "strategy=zero1 loop.micro_batches=2"),
    (Tied, Plain, 1, UNUSED),
    (Tied, Plain, 3, "strategy=fsdp"),
    (Remembering, Plain, 2, "strategy=zero1"),
    (Remembering, Plain, 2, "strategy=pp loop.micro_batches=2"),
    (Pruned, Plain, 2, "strategy=fsdp"),
    (Sloped, Plain, 2, "strategy=fsdp"),
    (Idle, Plain, 2, "strategy=zero1"),
]


@pytest.mark.parametrize(("network", "task", "ranks", "words"), quickly([*QUICK, *LONG], *QUICK))
def test_they_train_to_the_curve_of_one_process(train: Train, network: Any, task: Any, ranks: int, words: str) -> None:
    alike(
        train(f"loop.steps=5 {words}", ranks, model=network, task=task), train("loop.steps=5", model=network, task=task)
    )


def test_complex_weights_beside_real_ones_are_sharded(train: Train) -> None:
    common = f"{SGD} optimizer.fused=null precision=fp32"  # torch has no fused step of complex numbers
    seen, alone = train(f"{common} strategy=fsdp", 2, model=Waves), train(common, model=Waves)
    assert far(seen.losses, alone.losses) < 1e-5
    said = train.refused("precision=fp32 strategy=fsdp strategy.param_dtype=bf16", 2, model=Waves)
    assert "strategy.param_dtype=bf16: wave is complex" in said


class Embedded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, max_norm=1.0)


class TiedSparse(Net):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.again = nn.Embedding(3, WIDTH, sparse=True), nn.Linear(WIDTH, 3, bias=False)
        if tied:
            self.again.weight = self.table.weight


REFUSED: list[Any] = [
    (Embedded, 2, "strategy=ddp", r"the embedding table has max_norm: .* train on one data rank"),
    (Embedded, 2, "strategy=fsdp", r"the embedding table has max_norm: .* train on one data rank"),
    (
        TiedSparse,
        2,
        "strategy=ddp",
        r"the embedding table makes sparse .* is also again\.weight, which makes dense ones",
    ),
    (TiedSparse, 2, "strategy=zero1", r"the embedding table makes sparse ones; build it with sparse=False"),
    (Tied, 2, "strategy=tp", r"up, whose parameter is tied to again\.weight"),
    (Unguarded, 1, "", r"evaluations run without gradients, .*\.py:\d+ .*: with torch\.enable_grad\(\):"),
]


@pytest.mark.parametrize(
    ("network", "ranks", "words", "said"),
    quickly(REFUSED, *(case for case in REFUSED if case[1] < 4)),
)
def test_what_cannot_be_trained_so_is_refused(train: Train, network: Any, ranks: int, words: str, said: str) -> None:
    assert re.search(said, train.refused(f"loop.steps=1 {words}", ranks, model=network, code=None))


@dataclass
class Output(OrderedDict):
    """A dict and a dataclass, which takes neither a dict's arguments nor update(), as those of transformers."""

    logits: Tensor | None = None

    def __post_init__(self) -> None:
        if self.logits is not None:
            self["logits"] = self.logits

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("an output is not updated")


class Outputs(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class Named(Plain):
    def loss(self, output: Any, target: Any) -> Tensor:
        return super().loss(output.logits, target)

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output.logits, target)


EVERYWHERE = [(2, UNUSED), (2, "strategy=zero1"), (2, "strategy=tp"), (2, "strategy=fsdp"), (2, "strategy=pp")]
EVERYWHERE += [(1, "strategy=dp"), (2, "strategy=ddp strategy.static_graph=true")]


@pytest.mark.parametrize(("ranks", "words"), quickly(EVERYWHERE, (2, "strategy=fsdp"), (2, "strategy=pp")))
def test_an_output_that_is_no_tensor_goes_through_loss_and_evaluation(train: Train, ranks: int, words: str) -> None:
    alike(train(f"loop.steps=5 {words} loop.micro_batches=2", ranks, model=Outputs, task=Named), train("loop.steps=5"))
