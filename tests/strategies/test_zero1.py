"""What only zero1 has: owners, what travels to and from them, and optimizers that see whole parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies import toys
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.toys import CLASSES, NETWORKS, WIDTH, Case, Net, Plain, Routed, ToyData, run
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.parameter_owners import GradientReducer
from trainer.records.checkpoint.manifest import read_manifest
from trainer.records.checkpoint.store import inspect_checkpoint
from trainer.strategies.machine import Machine
from trainer.strategies.zero1 import Zero1

PARAMETERS = sum(parameter.numel() for parameter in Net().parameters())


class HeadOnly(nn.Linear):
    """Two parameters; of four ranks two own nothing."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)


class Idle(Net):
    """A frozen layer, and one that nothing calls: without a gradient it must not even decay."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)
        self.up.requires_grad_(False)


class Convolving(nn.Module):
    """Weights whose memory is in another order than their shape: channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 2)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x.view(-1, 3, 2, 2))).flatten(1).sigmoid())


class Shared(Net):
    """One layer in two segments that nested backwards recompute: its gradient is complete twice in one backward."""

    def forward(self, x: Tensor) -> Tensor:
        def segment(y: Tensor) -> Tensor:
            return self.norm(y + self.down(torch.tanh(self.up(y))))

        x = checkpoint(segment, x.requires_grad_(), use_reentrant=True)
        return self.head(checkpoint(segment, x, use_reentrant=True))


class Lars(torch.optim.Optimizer):
    """A rate for each parameter from the norms of all of it: no optimizer of single elements. After You et al. 2017."""

    def __init__(self, groups: Any, lr: float = 0.05) -> None:
        super().__init__(groups, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                trust = (parameter.norm() + 1e-3) / (parameter.grad.norm() + 1e-3)
                memory = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                memory.mul_(group["momentum"]).add_(parameter.grad * trust)
                parameter.sub_(group["lr"] * memory)


def trained(launch: Launch, case: Case, network: Any = None, optimizer: Any = None) -> dict[str, Any]:
    """A run, perhaps with a network and an optimizer of this file."""
    NETWORKS["special"] = network
    make = (lambda kind: optimizer) if optimizer else toys.make_optimizer
    with patch("tests.strategies.toys.make_optimizer", make):
        return run(launch, case.but(network="special") if network else case)


def furthest(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    if key == "weights":
        pairs = [(torch.tensor(one[key][name]), torch.tensor(other[key][name])) for name in other[key]]
        return max(float((a - b).abs().max()) for a, b in pairs)
    return max(abs(a - b) for a, b in zip(one[key], other[key], strict=True))


def assert_same_curve(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    for rank in ranks:
        assert max(furthest(rank, reference, key) for key in ("losses", "norms", "weights")) < 1e-10
        assert rank["weights"] == ranks[0]["weights"]  # to the bit


@pytest.mark.parametrize(
    ("size", "micro_batches", "task", "optimizer"),
    quickly(
        [
            (*case, optimizer)
            for case in ((1, 2, "plain"), (2, 4, "weighted"), (3, 1, "plain"))
            for optimizer in ("adamw", "sgd")
        ],
        (2, 4, "weighted", "sgd"),
        (3, 1, "plain", "adamw"),
    ),
)
def test_the_curve_is_that_of_one_process(
    processes: Processes, size: int, micro_batches: int, task: str, optimizer: str
) -> None:
    case = Case(precision="fp64", task=task, optimizer=optimizer)
    (reference,) = processes.run(1, trained, case)
    assert_same_curve(processes.run(size, trained, case.but(strategy="zero1", micro_batches=micro_batches)), reference)


@pytest.mark.parametrize(
    ("network", "size", "fields"),
    [
        (HeadOnly, 4, {}),
        (Routed, 2, {}),
        (Routed, 3, {}),
        (Idle, 2, {}),
        (Shared, 2, {}),
        (Shared, 3, {}),
        (Convolving, 2, {"sync_bn": True}),
        (Net, 2, {"activation_checkpointing": "units"}),
        (Net, 2, {"bucket_mb": 0}),
    ],
)
@pytest.mark.long
def test_odd_networks_train_to_the_curve_of_one_process(
    processes: Processes, network: type[nn.Module], size: int, fields: dict[str, Any]
) -> None:
    # Adam would amplify the gradient, rounded from zero, of a bias in front of a BatchNorm
    case = Case(precision="fp64", optimizer="sgd" if network is Convolving else "adamw", steps=16)
    (reference,) = processes.run(1, trained, case, network)
    for micro_batches in (1,) if network is Convolving else (1, 2):
        case = case.but(strategy="zero1", fields=fields, micro_batches=micro_batches)
        assert_same_curve(processes.run(size, trained, case, network), reference)


def foreach_adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


@pytest.mark.parametrize("optimizer", [Lars, torch.optim.Adafactor, foreach_adamw])
def test_every_optimizer_that_treats_parameters_one_by_one_is_exact(processes: Processes, optimizer: Any) -> None:
    (reference,) = processes.run(1, trained, Case(precision="fp64"), None, optimizer)
    assert_same_curve(processes.run(2, trained, Case("zero1", precision="fp64"), None, optimizer), reference)


def placed_with_groups(launch: Launch, network: type[nn.Module]) -> dict[str, Any]:
    """One step; then what this rank's optimizer holds."""
    torch.manual_seed(0)
    with Zero1(machine=Machine(launch=launch, device="cpu")) as strategy:
        stream = toys.TrainLoader(ToyData(), ToyData().train(), strategy.slice, 48, 2, toys.LoaderOptions())
        parallel_model = strategy.build(Plain(), network(), stream.example())
        whole = list(parallel_model.network.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for one in whole if one.dim() > 1]},
            {"params": [one for one in whole if one.dim() <= 1], "weight_decay": 0.0, "lr": 0.5},
        ]
        optimizer = parallel_model.optimizer(toys.make_optimizer("adamw"), groups)
        parallel_model.forward_backward(next(iter(stream.epoch(0))), 0)
        kept = [name for name, parameter in parallel_model.network.named_parameters() if parameter.grad is not None]
        parallel_model.optimizer_step(optimizer, None)
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return {
            "names": [name for name, parameter in parallel_model.network.named_parameters() if id(parameter) in owned],
            "gradients": kept,
            "rates": [group["lr"] for group in optimizer.param_groups],
            "bytes": sum(value.nbytes for memory in optimizer.state.values() for value in memory.values()),
            "state": sorted(parallel_model.state(optimizer)),
        }


def test_the_optimizer_is_shared_out(processes: Processes) -> None:
    (whole,) = processes.run(1, placed_with_groups, Net)
    for size in (2, 3):
        ranks = processes.run(size, placed_with_groups, Net)
        assert sorted(name for rank in ranks for name in rank["names"]) == sorted(whole["names"])
        assert sum(rank["bytes"] for rank in ranks) == whole["bytes"]
        largest = 8 * 24 * WIDTH  # two moments of `up`
        assert max(rank["bytes"] for rank in ranks) < whole["bytes"] / size + largest
        assert {name for rank in ranks for name in rank["state"]} == set(whole["state"])
        for rank in ranks:
            assert rank["gradients"] == rank["names"]  # nobody keeps the gradients of what is not its own
            assert rank["rates"] == [0.01, 0.5]


def test_halves_are_nearly_halves(processes: Processes) -> None:
    (whole,) = processes.run(1, placed_with_groups, Net)
    assert max(rank["bytes"] for rank in processes.run(2, placed_with_groups, Net)) < 0.55 * whole["bytes"]


def test_a_rank_that_owns_nothing_has_every_group(processes: Processes) -> None:
    ranks = processes.run(4, placed_with_groups, HeadOnly)
    assert sorted(len(rank["names"]) for rank in ranks) == [0, 0, 1, 1]
    assert [rank["rates"] for rank in ranks] == [[0.01, 0.5]] * 4


@pytest.mark.parametrize("task", quickly(["plain", "weighted"], "weighted"))
def test_four_micro_batches_send_what_one_sends(processes: Processes, task: str) -> None:
    (one, *_), (four, *_) = (
        processes.run(2, collectives_of_a_step, Case("zero1", task=task, micro_batches=slices)) for slices in (1, 4)
    )
    assert one == four


@pytest.mark.parametrize("size", [2, 3])
def test_every_gradient_and_every_parameter_travels_once(processes: Processes, size: int) -> None:
    for sent in processes.run(size, collectives_of_a_step, Case("zero1")):
        sums = {name: sum(n for other, n in sent if other == name) for name, _ in sent}
        assert sums.pop("gloo:reduce") == 4 * PARAMETERS
        assert sums.pop("gloo:broadcast") == 4 * PARAMETERS
        assert sum(sums.values()) == 4 * 8  # a mask: has any rank a gradient? (counted as if of four bytes)
        assert len(sent) == 2 * size + 1


def test_one_process_sends_nothing(processes: Processes) -> None:
    assert processes.run(1, collectives_of_a_step, Case("zero1")) == [[]]


def left_behind(launch: Launch) -> list[list[str]]:
    """Whose gradients are here before the last of two micro-batches, and after it, before anyone waits for them."""
    seen: list[list[str]] = []

    class Watched(GradientReducer):
        def look(self) -> None:
            seen.append([name for name, one in parallel_model.network.named_parameters() if one.grad is not None])

        def begin(self) -> None:
            self.look()
            super().begin()

        def finish(self) -> None:
            self.look()
            super().finish()

    with (
        patch("trainer.strategies.zero1.GradientReducer", Watched),
        Zero1(machine=Machine(launch=launch, device="cpu")) as strategy,
    ):
        stream = toys.TrainLoader(ToyData(), ToyData().train(), strategy.slice, 48, 2, toys.LoaderOptions())
        parallel_model = strategy.build(Plain(), Net(), stream.example())
        parallel_model.forward_backward(next(iter(stream.epoch(0))), 0)
    return seen


def test_gradients_leave_during_the_last_backward_only(processes: Processes) -> None:
    for first, last in processes.run(2, left_behind):
        assert len(first) == 8
        assert last == []


@pytest.mark.parametrize("precision", quickly(["bf16", "fp16"], "fp16"))
def test_reduced_precision_trains_alike_on_all_ranks(processes: Processes, precision: str) -> None:
    one, other = processes.run(2, trained, Case("zero1", precision=precision))
    (reference,) = processes.run(1, trained, Case(precision=precision))
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert one["weights"] == other["weights"]
    assert one["losses"][-1] == pytest.approx(reference["losses"][-1], abs=0.05)
    assert ("scaler/scale" in one["state"]) == (precision == "fp16")


@pytest.mark.parametrize("optimizer", quickly(["adamw", "sgd"], "adamw"))
@pytest.mark.parametrize(
    ("source", "target"),
    quickly(
        [((2, "zero1"), (1, "single")), ((2, "zero1"), (3, "zero1")), ((1, "single"), (3, "zero1"))],
        ((2, "zero1"), (3, "zero1")),
    ),
)
def test_a_checkpoint_goes_on_with_other_owners_and_with_none(
    processes: Processes, source: tuple[int, str], target: tuple[int, str], optimizer: str, tmp_path: Path
) -> None:
    case = Case(precision="fp64", optimizer=optimizer, steps=14)
    (reference,) = processes.run(1, trained, case)
    (size_a, a), (size_b, b) = source, target
    processes.run(size_a, trained, case.but(strategy=a, folder=str(tmp_path), save=6, steps=6))
    for rank in processes.run(size_b, trained, case.but(strategy=b, folder=str(tmp_path), start=6)):
        assert furthest(rank, {**rank, "losses": reference["losses"][6:]}, "losses") < 1e-10
        assert furthest(rank, reference, "weights") < 1e-10


def test_a_checkpoint_has_the_names_that_one_process_gives_it(processes: Processes, tmp_path: Path) -> None:
    stored = {}
    for size, strategy in ((1, "single"), (3, "zero1")):
        folder = tmp_path / strategy
        processes.run(size, trained, Case(strategy, folder=str(folder), save=2, steps=2))
        stored[strategy] = {
            name: (fact.dtype, fact.shape)
            for name, fact in inspect_checkpoint(read_manifest(next(folder.rglob("step-*")))).tensors.items()
        }
    assert stored["zero1"] == stored["single"]


@pytest.mark.long  # test_contract.py resumes it, too
def test_stopped_and_resumed_it_has_the_same_bits(processes: Processes, tmp_path: Path) -> None:
    unbroken = processes.run(3, trained, Case("zero1"))
    assert processes.run(3, trained, Case("zero1")) == unbroken
    processes.run(3, trained, Case("zero1", folder=str(tmp_path), save=10, steps=10))
    for rank, whole in zip(
        processes.run(3, trained, Case("zero1", folder=str(tmp_path), start=10)), unbroken, strict=True
    ):
        assert rank["losses"] == whole["losses"][10:]
        assert rank["weights"] == whole["weights"]


def test_sparse_gradients_are_refused_in_words() -> None:
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(Refusal, match=r"the embedding 0 makes sparse ones; build it with sparse=False"):
        Zero1().check(Plain(), network, 2)
    network.requires_grad_(False)
    Zero1().check(Plain(), network, 2)
