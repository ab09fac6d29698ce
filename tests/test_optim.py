"""Optimizers as runs use them: a fused step does what torch's plain one does, whatever gradients come, and when."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.commands import curve, lines
from tests.inside import product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.learning.freezing import refuse_frozen
from trainer.learning.optimizer import (
    fused_argument,
    init_momentum,
    parameter_groups,
    should_spare_vectors,
    without_compiler,
)
from trainer.messages import Refusal


class Late(nn.Module):
    """A part of it has its first gradients in the fourth step; `loud` outputs overflow in fp16's first steps."""

    def __init__(self, loud: float = 1.0) -> None:
        super().__init__()
        self.head, self.late, self.loud = nn.Linear(64, 10), nn.Linear(64, 10), loud
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = self.head(x.flatten(1))
        return self.loud * (y + self.late(x.flatten(1)) if self.calls > 3 else y)


class Table(nn.Module):
    """Pixels as rows of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 4 + 8).long().clamp(0, 19)).flatten(1))


BRIEF = ["trust=[tests]", "loop.log_every=1", "loop.global_batch=24", "loop.eval_every=null", "schedule=constant"]
PLAIN = ["optimizer=sgd", "optimizer.nesterov=false", "optimizer.weight_decay=0"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with these networks as options of `model`."""
    for name in ("late", "table"):
        option = tmp_path / "conf" / "model" / f"{name}.yaml"
        option.parent.mkdir(parents=True, exist_ok=True)
        option.write_text(f"_target_: tests.test_optim.{name.title()}\n")
    return tmp_path


def words(name: str, *others: str) -> list[str]:
    return ["--config-dir", "conf", *BRIEF, f"run.dir={name}", *others]


def losses(home: Path, name: str, *others: str) -> list[float]:
    assert product(Launch(), home, words(name, *others)) == 0
    return curve(home / name)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(["optimizer=sgd"], marks=pytest.mark.long),
        pytest.param(["optimizer=sgd", "+optimizer.maximize=true", "optimizer.nesterov=false"], marks=pytest.mark.long),
        pytest.param(["optimizer=sgd", "+optimizer.dampening=0.5", "optimizer.nesterov=false"], marks=pytest.mark.long),
        ["optimizer=adamw"],
        pytest.param(
            ["optimizer=adam", "optimizer._target_=torch.optim.Adagrad", "~optimizer.betas"], marks=pytest.mark.long
        ),
    ],
    ids=" ".join,
)
def test_late_gradients_and_overflows_are_those_of_torchs_plain_step(home: Path, optimizer: list[str]) -> None:
    # deterministic: torch fills memory that nobody has written with NaN
    run = [
        "model=late",
        "+model.loud=100",
        "optimizer.lr=1e-5",
        "precision=fp16",
        "loop.deterministic=true",
        *optimizer,
    ]
    whole = losses(home, "fused", *run, "loop.steps=24")
    norms = curve(home / "fused", "grad_norm")
    assert [isfinite(norm) for norm in (norms[0], norms[1], norms[-1])] == [False, False, True]
    assert whole == pytest.approx(losses(home, "plain", *run, "loop.steps=24", "optimizer.fused=false"), rel=1e-5)
    losses(home, "begun", *run, "loop.steps=2")  # nothing but overflows so far, and the late part has not begun
    assert product(Launch(), home, words("on", *run, "loop.steps=24", "run.resume=begun")) == 0
    assert [line["loss"] for line in lines(home / "on", "train")] == whole[2:]


def test_dampened_momentum_begins_with_the_first_gradient_as_torchs() -> None:
    torchs, ours = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter, begin in ((torchs, lambda _: None), (ours, init_momentum)):
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.5)
        begin(optimizer)
        for step in range(3):
            parameter.grad = torch.full((3,), 1.0 + step)
            optimizer.step()
    assert torch.equal(ours, torchs)


def test_decay_spares_vectors_and_numbers_and_no_sparse_step_is_fused() -> None:
    network = nn.ModuleDict(
        {"table": nn.Embedding(3, 2, sparse=True), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)}
    )
    network.add_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    network.register_parameter("number", nn.Parameter(torch.zeros(())))
    names = {parameter: name for name, parameter in network.named_parameters()}

    def grouped(spare_vectors: bool) -> list[Any]:
        return [(" ".join(names[p] for p in g.pop("params")), g) for g in parameter_groups(network, spare_vectors)]

    sparse = ("table.weight", {"fused": False})
    vectors = ("number norm.weight norm.bias head.bias", {"weight_decay": 0.0})
    assert grouped(True) == [("head.weight", {}), sparse, vectors]
    assert grouped(False) == [("number norm.weight norm.bias head.weight head.bias", {}), sparse]
    network["head"].weight.requires_grad_(False)
    assert grouped(True)[0] == ("", {})  # the first has the rate that is logged, whatever learns by it
    with pytest.raises(Refusal, match="ModuleDict has no trainable parameter"):
        refuse_frozen(network.requires_grad_(False), [])


@pytest.mark.parametrize(
    ("kind", "amount", "decay", "spared"),
    [
        (torch.optim.AdamW, None, "weights", True),  # its default is 0.01
        (torch.optim.SGD, 0.1, "weights", True),
        (torch.optim.SGD, 0.1, "all", False),
        (torch.optim.AdamW, 0.0, "weights", False),  # one group where decay is the same
        (torch.optim.SGD, None, "weights", False),
        (torch.optim.Rprop, 0.1, "weights", False),
    ],
)
def test_vectors_are_spared_where_something_decays(kind: Any, amount: float | None, decay: str, spared: bool) -> None:
    assert should_spare_vectors(kind, amount, decay) is spared


def test_a_step_is_fused_where_it_can_be_and_was_not_asked_otherwise() -> None:
    sgd, adamw, rprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop
    assert [fused_argument(adamw, wish) for wish in (None, True, False)] == [{"fused": w} for w in (True, True, False)]
    assert (fused_argument(sgd, None, dampening=0.5), fused_argument(rprop, None)) == ({"fused": False}, {})
    with pytest.raises(Refusal, match="Rprop has no fused step"):
        fused_argument(rprop, True)


def test_a_run_decays_weights_alone_unless_all_are_named(home: Path) -> None:
    ends = []
    for decay in ("weights", "all"):
        losses(
            home,
            decay,
            "model=late",
            "optimizer.weight_decay=1",
            f"optimizer.decay={decay}",
            "optimizer=sgd",
            "loop.steps=1",
        )
        ends.append(load_file(next(home.glob(f"{decay}/checkpoints/*/*-00001-of-00002.safetensors"))))
    apart = {name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])}
    assert apart == {"head.bias"}  # what is late has had no gradient yet


def test_a_dampened_step_is_not_fused(home: Path) -> None:
    with pytest.raises(Refusal, match=r"leave optimizer.fused out"):
        losses(
            home, "no", "optimizer=sgd", "optimizer.nesterov=false", "optimizer.fused=true", "+optimizer.dampening=0.5"
        )


def test_sparse_gradients_train_alone_and_under_ddp(home: Path, processes: Processes) -> None:
    run = ["model=table", *PLAIN, "loop.steps=6", "loop.max_norm=1"]
    alone = losses(home, "alone", *run)
    assert processes.run(2, product, home, words("two", *run, "strategy=ddp", "loop.micro_batches=2")) == [0, 0]
    assert curve(home / "two") == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["optimizer=adamw"], "AdamW says: Adam does not support sparse gradients"),
        (["optimizer=sgd"], "the embedding table makes sparse gradients, and SGD says"),
    ],
)
def test_an_optimizer_that_takes_no_sparse_gradients_is_refused(home: Path, others: Any, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        losses(home, "no", "model=table", *others)
    assert not (home / "no").exists()


class Loose(torch.optim.SGD):
    """Without annotations, as many write them: nothing but the value tells that a rate is no number."""

    def __init__(self, params, lr=1e-3) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.parametrize("rate", ["fast", "null"])
def test_a_rate_that_is_no_number_is_refused_whoever_takes_it(home: Path, rate: str) -> None:
    own = ["optimizer=torch", "optimizer._target_=tests.test_optim.Loose", f"optimizer.lr={rate}", "schedule=plateau"]
    with pytest.raises(Refusal, match=f"optimizer.lr={rate}: expected a number"):
        losses(home, "no", "model=late", *own)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True, "maximize": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_class_without_the_compiler_steps_as_torchs_own_to_the_bit(kind: Any, own: dict[str, Any]) -> None:
    values, calls = [], []
    for each in (kind, without_compiler(kind)):
        parameter, late = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
        optimizer = each([parameter, late], lr=0.1, weight_decay=0.1, **own)
        init_momentum(optimizer)  # without it torch's own fused step fails, once `late` has a gradient
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        for step in range(6):
            optimizer.zero_grad()
            (parameter**3 + (late**2 if step > 1 else 0)).sum().backward()
            optimizer.step()
            if step % 2:
                optimizer.load_state_dict(optimizer.state_dict())
        values.append([parameter.tolist(), late.tolist()])
        assert isinstance(optimizer, kind)
        assert repr(optimizer).startswith(kind.__name__)
    assert values[0] == values[1]
    assert calls == ["pre", "post"] * 12
