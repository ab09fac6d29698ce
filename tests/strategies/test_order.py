"""Tensor cut, recomputing, compiling, data axes, in that order: under every strategy the curve of one plain process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from recipes.vision.vit import MLP, Block
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import CLASSES, STRATEGIES, WIDTH, Plain, ToyData, built, make_optimizer, whole
from trainer import Plan
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.learning.optimizer import init_momentum
from trainer.parallel.buckets import Sums
from trainer.parallel.compile import CompileSettings
from trainer.strategies.base import Strategy
from trainer.strategies.machine import Machine
from trainer.strategies.parallel_model import ParallelModel

BATCH = 24
TOKENS, DEPTH = 6, 3


class Tower(nn.Module):
    """A small transformer: blocks that are units, each cut over tensor ranks. x: (B, 12) read as (B, 6, 2)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH // TOKENS, 8)
        self.blocks = nn.ModuleList(Block(8, 4, dropout) for _ in range(DEPTH))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(1, (TOKENS, -1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        tensor = {
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
        }
        return Plan(tensor, {"heads": 4}, shard=("blocks.*",))


class Normed(nn.Sequential):
    """Units with batch statistics."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(DEPTH))
        super().__init__(*blocks, nn.Linear(WIDTH, CLASSES))


class Dropped(MLP):
    """Draws."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Small(nn.Sequential):
    """What is cheap to compile: alike blocks of two layers, behind one, so that all their inputs want gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), *(Dropped(8) for _ in range(DEPTH)), nn.Linear(8, CLASSES))

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan({"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}, shard=("[123]",))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tower": Tower,
    "normed": Normed,
    "small": Small,
    "dropout": lambda: Tower(dropout=0.3),
}


@dataclass(frozen=True)
class Order:
    """A few steps of a toy under a strategy."""

    strategy: str = "single"
    fields: dict[str, Any] = field(default_factory=dict)
    network: str = "tower"
    mode: str = "none"  # what is recomputed
    compile: Any = None  # torch.compile's mode
    precision: str = "fp64"
    optimizer: str = "sgd"
    steps: int = 4
    micro_batches: int = 2

    def but(self, **changes: Any) -> Order:
        return replace(self, **changes)

    def place(self, launch: Launch) -> Strategy:
        machine = Machine(
            launch=launch,
            device="cpu",
            precision=self.precision,
            compile=CompileSettings(self.compile) if self.compile else None,
        )
        fields = {"activation_checkpointing": self.mode, **self.fields}
        return STRATEGIES[self.strategy](machine=machine, **fields)


SINGLE = Order()
# name → (processes, the case)
SPREAD = {
    "single": (1, SINGLE),
    "ddp on 2": (2, Order("ddp")),
    "zero1 on 2": (2, Order("zero1")),
    "tp on 2": (2, Order("tp")),
    "ddp_tp on 4": (4, Order("ddp_tp", {"tensor": 2})),
    "fsdp on 2": (2, Order("fsdp")),
    "hsdp on 4": (4, Order("fsdp", {"replicate": 2})),
    "fsdp_tp on 4": (4, Order("fsdp", {"tensor": 2})),
    "pp on 2": (2, Order("pp")),
    "fsdp_pp on 4": (4, Order("pp", {"pipe": 2, "shard": 2})),
}
# on two ranks each is alone, on four with another
TWO = [where for where, (size, _) in SPREAD.items() if size == 2]
modes = pytest.mark.parametrize("mode", ["units", "operators"])
_done: dict[str, list[dict[str, Any]]] = {}


def train(launch: Launch, case: Order) -> dict[str, Any]:
    """Losses by step, and what the network holds at the end."""
    torch.manual_seed(3)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # none of its own processes beside these
    strategy = case.place(launch)
    strategy.data_ranks(launch.world_size)
    network, task = built(strategy, NETWORKS[case.network]), Plain()
    strategy.check(task, network, launch.world_size)
    with strategy:
        stream = _stream(strategy, case)
        parallel_model = strategy.build(task, network, stream.example())
        optimizer = parallel_model.optimizer(
            make_optimizer(case.optimizer), [{"params": list(parallel_model.network.parameters())}]
        )
        init_momentum(optimizer)
        losses = []
        for step, batches in zip(range(case.steps), stream.epoch(0), strict=False):
            parts = parallel_model.forward_backward(batches, step)
            parallel_model.optimizer_step(optimizer, 1.0)
            losses.append(float(strategy.totals(parts).read()["loss"]))
        parallel_model.settle()
        figures = strategy.totals(_evaluated(parallel_model, strategy)).read()
        weights = {name: whole(value) for name, value in parallel_model.network.state_dict().items()}
    if case.compile:
        torch.compiler.reset()
    return {"losses": losses, "evaluation": float(figures["loss"] / figures["weight"]), "weights": weights}


@torch.no_grad()
def _evaluated(parallel_model: ParallelModel, strategy: Strategy) -> Sums:
    """The first evaluation batch, which has the same samples whatever the number of ranks."""
    data = ToyData()
    batch, valid = next(iter(EvalLoader(data, data.evaluation(), strategy.slice, BATCH, 1, LoaderOptions()).batches()))
    return parallel_model.evaluate(batch, valid)


def _stream(strategy: Strategy, case: Order) -> TrainLoader:
    data = ToyData()
    return TrainLoader(data, data.train(), strategy.slice, BATCH, case.micro_batches, LoaderOptions())


@pytest.fixture
def trained(processes: Processes) -> Any:
    """Train a case on so many ranks; one that ran before is remembered."""

    def remembered(size: int, case: Order) -> list[dict[str, Any]]:
        key = f"{size} {case}"
        if key not in _done:
            _done[key] = processes.run(size, train, case)
        return _done[key]

    return remembered


def close(ranks: list[dict[str, Any]], references: list[dict[str, Any]], bound: float) -> None:
    """Is every rank as the reference of the same number, or as the only one?"""
    for rank, reference in zip(ranks, cycle(references), strict=False):
        assert rank["losses"] == pytest.approx(reference["losses"], abs=bound)
        assert rank["weights"].keys() <= reference["weights"].keys()  # a rank of a pipeline has some of them
        for name, value in rank["weights"].items():
            assert torch.allclose(torch.tensor(value), torch.tensor(reference["weights"][name]), 0, bound), name


@pytest.mark.long
@pytest.mark.parametrize("where", quickly(SPREAD, *TWO))
@modes
def test_recomputing_leaves_the_curve_that_of_one_process(trained: Any, where: str, mode: str) -> None:
    size, case = SPREAD[where]
    close(trained(size, case.but(mode=mode)), trained(1, SINGLE), 1e-10)


@pytest.mark.parametrize("where", quickly(SPREAD, "ddp on 2", "fsdp on 2", "pp on 2"))
def test_dropout_repeats_its_masks(trained: Any, where: str) -> None:
    size, case = SPREAD[where]
    case = case.but(network="dropout")
    # compared with as many data ranks, for each has masks of its own
    close(trained(size, case.but(mode="units")), trained(size, case), 1e-10)


@pytest.mark.parametrize(
    ("sync_bn", "mode"),
    quickly(
        [(sync, mode) for sync in (False, True) for mode in ("units", "operators")],
        (False, "operators"),
        (True, "units"),
    ),
)
def test_running_statistics_move_once_a_step(trained: Any, mode: str, sync_bn: bool) -> None:
    case = Order("ddp", {"sync_bn": sync_bn}, network="normed")
    close(trained(2, case.but(mode=mode)), trained(2, case), 1e-10)
    if sync_bn:
        close(trained(2, case), trained(1, SINGLE.but(network="normed")), 1e-10)


def collectives(launch: Launch, case: Order) -> Counter[str]:
    """How many collectives one step has, by name."""
    torch.manual_seed(3)
    with case.place(launch) as strategy:
        stream = _stream(strategy, case)
        parallel_model: ParallelModel = strategy.build(Plain(), NETWORKS[case.network](), stream.example())
        batches = next(iter(stream.epoch(0)))
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            parallel_model.forward_backward(batches, 0)
            strategy.world.barrier()  # a collective's event may end just after it
    return Counter(event.name for event in recorded.events() if event.name.startswith("gloo:"))


@pytest.mark.long
def test_what_tensor_ranks_told_each_other_is_not_told_again_where_operators_are_kept(processes: Processes) -> None:
    case = Order("tp", micro_batches=1)
    plain, units, operators = (
        processes.run(2, collectives, case.but(mode=mode))[0]["gloo:all_reduce"]
        for mode in ("none", "units", "operators")
    )
    assert operators == plain
    assert plain < units <= plain + 2 * DEPTH  # an attention's and an MLP's in each block


# 12 rows in each micro-batch: what one compiles the others find in torch's cache
COMPILED = {
    "single": (1, SINGLE),
    "ddp on 2": (2, Order("ddp", mode="units", micro_batches=1)),
    "tp on 2": (2, Order("tp", mode="operators")),
    "fsdp on 2": (2, Order("fsdp", mode="units", micro_batches=1)),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("where", quickly(COMPILED, "fsdp on 2"))
def test_compiled_it_is_the_same_curve(trained: Any, where: str) -> None:
    size, case = COMPILED[where]
    case = case.but(network="small", precision="fp32", steps=2)
    (reference,) = trained(1, SINGLE.but(network="small", precision="fp32", steps=2))
    ranks = trained(size, case.but(compile=case.compile or "default"))
    close(ranks, [reference], 1e-5)
    assert {name for rank in ranks for name in rank["weights"]} == reference["weights"].keys()  # names stay
    assert [rank["evaluation"] for rank in ranks] == pytest.approx([reference["evaluation"]] * size, abs=1e-5)
