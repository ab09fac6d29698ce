"""Networks that one process trains without a thought, and that several could stumble over."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import CLASSES, NETWORKS, TASKS, WIDTH, Case, Net, Plain, Routed, run
from trainer import Plan, Task
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.tp import TP
from trainer.strategies.zero1 import Zero1


class Buffers(Net):
    """Buffers of every kind, one of them made by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("mask", torch.bool), ("counts", torch.int16), ("scales", torch.bfloat16)):
            self.register_buffer(name, torch.ones(3, dtype=dtype))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(1), persistent=False)
        return super().forward(x) * self.get_buffer("cache")


class FourDimensions(Net):
    """A parameter of four dimensions in a network that convolves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, 1, 1, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor[0, 0]


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


class HiddenSlope(Sloped):
    """On shapes alone it cannot run, so nobody knows beforehand what it does."""

    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy()
        return super().forward(x)


class Unguarded(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return super().forward(x + slope)


class SlopeInLoss(Plain):
    """A derivative between two outputs."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            return {"x": inputs, "scores": network(inputs)}

    def loss(self, output: Any, target: Any) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(output["scores"].sum(), output["x"], create_graph=True)
            return super().loss(output["scores"], target) + slope.square().mean()

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output["scores"], target)


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


def with_special(
    launch: Launch, network: type[nn.Module], task: type[Task], case: Case, precision: str = "fp64"
) -> dict[str, Any]:
    NETWORKS["special"], TASKS["special"] = network, task
    return run(launch, case.but(network="special", task="special", precision=precision))


@pytest.mark.parametrize(
    ("network", "task", "size", "case"),
    [
        pytest.param(Buffers, Plain, 2, Case("ddp"), marks=pytest.mark.long),
        (Buffers, Plain, 2, Case("tp")),
        (FourDimensions, Plain, 2, Case("ddp")),
        (Recomputed, Plain, 2, Case("ddp")),
        (Routed, Plain, 2, Case("ddp", {"find_unused_parameters": True})),
        pytest.param(Routed, Plain, 4, Case("ddp_tp", {"tensor": 2}), marks=pytest.mark.long),
        (Routed, Plain, 3, Case("ddp_tp", {"tensor": 1})),
        (Tied, Plain, 1, Case("ddp")),
        (Remembering, Plain, 2, Case("fsdp", micro_batches=2)),
        pytest.param(Remembering, Plain, 2, Case("fsdp", {"reshard_after_forward": False}), marks=pytest.mark.long),
        pytest.param(Remembering, Plain, 2, Case("zero1"), marks=pytest.mark.long),
        pytest.param(Remembering, Plain, 2, Case("pp", micro_batches=2), marks=pytest.mark.long),
        (Pruned, Plain, 2, Case("fsdp")),
        pytest.param(Pruned, Plain, 2, Case("pp", micro_batches=2), marks=pytest.mark.long),
        (Sloped, Plain, 2, Case("fsdp", {"reshard_after_forward": False}, micro_batches=2)),
        pytest.param(Sloped, Plain, 2, Case("fsdp"), marks=pytest.mark.long),
        (Net, WholeNumbers, 2, Case("ddp", micro_batches=2)),
        (Net, SlopeInLoss, 2, Case("ddp")),
        pytest.param(Net, WholeNumbers, 4, Case("ddp_tp", {"tensor": 2}), marks=pytest.mark.long),
    ],
)
def test_they_train_to_the_curve_of_one_process(
    processes: Processes, network: type[nn.Module], task: type[Task], size: int, case: Case
) -> None:
    if network is Tied:
        case = case.but(fields={"find_unused_parameters": True})
    (reference,) = processes.run(1, with_special, network, task, Case())
    for rank in processes.run(size, with_special, network, task, case):
        assert max(abs(a - b) for a, b in zip(rank["losses"], reference["losses"], strict=True)) < 1e-10
        assert max(abs(a - b) for a, b in zip(rank["norms"], reference["norms"], strict=True)) < 1e-10


def test_complex_weights_beside_real_ones_are_sharded(processes: Processes) -> None:
    case = Case(optimizer="sgd")  # torch has no fused Adam of complex numbers
    (reference,) = processes.run(1, with_special, Waves, Plain, case, "fp32")
    for rank in processes.run(2, with_special, Waves, Plain, case.but(strategy="fsdp"), "fp32"):
        assert rank["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    with pytest.raises(Refusal, match=r"strategy\.param_dtype=bf16: wave is complex"):
        FSDP(param_dtype="bf16").check(Plain(), Waves(), 2)


@pytest.mark.parametrize("strategy", [DDP, FSDP, Zero1])
def test_an_embedding_that_changes_its_weights_in_a_forward_is_refused(strategy: Any) -> None:
    network = nn.Sequential(nn.Embedding(3, WIDTH, max_norm=1.0), Net())
    with pytest.raises(Refusal, match=r"the embedding 0 has max_norm: .* train on one data rank"):
        strategy().check(Plain(), network, 2)
    DDP().check(Plain(), network, 1)


def test_a_sparse_gradient_that_tying_makes_dense_is_refused() -> None:
    network = nn.Sequential(nn.Embedding(3, WIDTH, sparse=True), nn.Linear(WIDTH, 3, bias=False))
    DDP().check(Plain(), network, 2)
    network[1].weight = network[0].weight
    with pytest.raises(Refusal, match=r"the embedding 0 makes sparse .* is also 1\.weight, which makes dense ones"):
        DDP().check(Plain(), network, 2)


def test_tied_parameters_are_not_cut_apart() -> None:
    with pytest.raises(Refusal, match=r"up, whose parameter is tied to again\.weight"):
        TP().check(Plain(), Tied(), 2)


class Block(nn.Module):
    """A layer that is called with other weights than its own, and so learns through them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Perturbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.5 * weight for name, weight in self.block.named_parameters()}
        return self.head(torch.func.functional_call(self.block, weights, (x,)))

    def plan(self) -> Plan:
        return Plan({"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}, shard=("block",))


class Enclosed(Perturbed):
    """The unit is what makes the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perturbed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def plan(self) -> Plan:
        return Plan(shard=("inner",))


@pytest.mark.parametrize(
    ("network", "size", "case"),
    [
        (Perturbed, 1, Case(fields={"activation_checkpointing": "units"})),
        (Perturbed, 2, Case("ddp")),
        pytest.param(Perturbed, 2, Case("zero1"), marks=pytest.mark.long),
        pytest.param(Perturbed, 2, Case("tp"), marks=pytest.mark.long),
        (Perturbed, 2, Case("pp")),
        (Enclosed, 2, Case("fsdp")),
    ],
)
def test_a_layer_called_with_other_weights_learns_through_them(
    processes: Processes, network: type[nn.Module], size: int, case: Case
) -> None:
    case = case.but(steps=3)
    (reference,) = processes.run(1, with_special, network, Plain, case.but(strategy="single", fields={}))
    for rank in processes.run(size, with_special, network, Plain, case):
        assert max(abs(a - b) for a, b in zip(rank["norms"], reference["norms"], strict=True)) < 1e-10


def refused(launch: Launch, network: type[nn.Module], case: Case) -> str:
    try:
        with_special(launch, network, Plain, case)
    except Refusal as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case("fsdp")),
        pytest.param(2, Case("fsdp", {"reshard_after_forward": False}), marks=pytest.mark.long),
        pytest.param(4, Case("fsdp", {"tensor": 2}), marks=pytest.mark.long),
    ],
)
def test_where_it_would_learn_through_its_own_it_is_refused(processes: Processes, size: int, case: Case) -> None:
    for said in processes.run(size, refused, Perturbed, case.but(steps=1)):
        assert "block" in said
        assert "other parameters than its own" in said


@pytest.mark.parametrize(
    ("network", "size", "word", "said"),
    [
        (HiddenSlope, 2, "fsdp", r"a gradient is taken with create_graph=True .* strategy=zero1 and strategy=ddp"),
        (Unguarded, 1, "single", r"evaluations run without gradients, .*\.py:\d+ .*: with torch\.enable_grad\(\):"),
    ],
)
def test_a_gradient_where_there_can_be_none_is_refused(
    processes: Processes, network: type[nn.Module], size: int, word: str, said: str
) -> None:
    for refusal in processes.run(size, refused, network, Case(word, steps=1)):
        assert re.match(said, refusal)


class Codebook(nn.Module):
    """Its forward puts a new parameter in the place of another, as VQ-VAEs with moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = Net(), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = nn.Parameter(0.9 * self.mean + 0.1 * x.mean(0))
        return self.net(x - self.mean.detach())


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (1, Case("single")),
        (2, Case("fsdp")),
        pytest.param(2, Case("ddp"), marks=pytest.mark.long),
        pytest.param(2, Case("ddp", {"find_unused_parameters": True}), marks=pytest.mark.long),
    ],
)
def test_a_forward_that_replaces_parameters_is_refused(processes: Processes, size: int, case: Case) -> None:
    for said in processes.run(size, refused, Codebook, case.but(steps=1)):
        assert said.startswith("the forward puts new parameters in the place of mean: ")


@dataclass
class Answer:
    """A dataclass that nobody has told torch of."""

    logits: Tensor
    notes: dict[str, Any]


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


class Answers(Net):
    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x), {"mean": x.mean()})


class Outputs(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class Named(Plain):
    def loss(self, output: Any, target: Any) -> Tensor:
        return super().loss(output.logits, target)

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output.logits, target)


EVERYWHERE = [
    (1, Case("dp")),
    (2, Case("ddp", {"find_unused_parameters": True})),
    (2, Case("ddp", {"static_graph": True})),
    (2, Case("zero1")),
    (2, Case("tp")),
    (2, Case("fsdp")),
]
PIPELINE = (2, Case("pp"))


@pytest.mark.parametrize(
    ("network", "size", "case"),
    [
        *quickly(
            [(Answers, *where) for where in (*EVERYWHERE, PIPELINE)], (Answers, *EVERYWHERE[-1]), (Answers, *PIPELINE)
        ),
        *[pytest.param(Outputs, size, case, marks=pytest.mark.long) for size, case in (*EVERYWHERE, PIPELINE)],
    ],
)
def test_an_output_that_is_no_tensor_goes_through_loss_and_evaluation(
    processes: Processes, network: type[nn.Module], size: int, case: Case
) -> None:
    case = case.but(steps=5, micro_batches=2)
    (reference,) = processes.run(1, with_special, Net, Plain, case.but(strategy="single", fields={}))
    for rank in processes.run(size, with_special, network, Named, case):
        assert max(abs(a - b) for a, b in zip(rank["norms"], reference["norms"], strict=True)) < 1e-10
        assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-10)
