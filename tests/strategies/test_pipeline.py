"""Pipelines: every schedule is exact, whatever flows through; what cannot flow is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.run import far, quickly, run
from tests.strategies.networks import Blocks, Rows, ToyData, Weighted
from tests.strategies.runs import SGD, Train, alike, typed
from trainer import Plan


class Layers(nn.Module):
    """A shape, a mask, a buffer, and values that are handed on and not in order in memory."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.place = nn.Parameter(torch.linspace(-1, 1, 16))
        self.last = nn.Linear(16, 4)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 2, 16))

    def forward(self, inputs: Any) -> Tensor:
        x = inputs["x"]
        early = F.gelu(self.first(x)).t().contiguous().t() * self.scale + self.place  # (B, 16), not in order in memory
        batch = early.shape[0]
        y = (self.dropout(self.second(early)) * (x[:, :1] > -1)).t().contiguous().t()
        y = F.gelu(self.third(y))
        return self.last(y.view(batch, -1) * self.scale)

    def plan(self) -> Plan:
        return Plan(tensor={"second": ColwiseParallel(), "third": RowwiseParallel()}, cuts=("third",))


class Recalling(nn.Module):
    """It uses what is handed on once more, in a way that no gradient can come back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Any) -> Tensor:
        early = self.first(inputs["x"])
        return self.last(self.middle(early) * early.detach())

    def plan(self) -> Plan:
        return Plan(cuts=("middle",))


class Named(Rows):
    """Numbers and names."""

    def batch(self, indices: Tensor) -> Any:
        x, targets = super().batch(indices)
        return {"x": x, "names": [f"sample {at}" for at in indices.tolist()]}, targets


class NamedData(ToyData):
    def train(self) -> Any:
        return Named(220, 1)

    def evaluation(self) -> Any:
        return Named(36, 2)

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        return inputs, targets


def exact(train: Train, ranks: int, words: str, model: Any = Layers, common: str = "loop.micro_batches=4") -> None:
    """A few steps, and evaluations of which one rank has few samples that count, or none, are those of one process."""
    parts: dict[str, Any] = {"model": model, "task": Weighted}
    parts |= {} if issubclass(model, Blocks) else {"data": NamedData}
    common = f"{SGD} loop.steps=3 loop.global_batch=24 loop.eval_batch=7 {common}"
    alike(train(f"{common} {words}", ranks, **parts), train(common, **parts))


SCHEDULES = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def skip_what_is_refused(words: str) -> None:
    if "ZBV" in words or "DualPipeV" in words:
        pytest.importorskip("torch", "2.13", reason="gloo cannot run it before, so it is refused")


@pytest.mark.parametrize("schedule", quickly(SCHEDULES, "Interleaved1F1B"))
def test_every_schedule_computes_what_one_process_does(train: Train, schedule: str) -> None:
    skip_what_is_refused(schedule)
    exact(train, 2, f"strategy=pp strategy.schedule={schedule}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "schedule", "micro_batches"),
    [(4, "1F1B", 1), (3, "1F1B", 2), (4, "GPipe", 2), (2, "Interleaved1F1B", 3), (2, "InterleavedZeroBubble", 6)],
)
def test_fewer_micro_batches_than_stages_and_any_number_that_torch_can_run_are_exact(
    train: Train, ranks: int, schedule: str, micro_batches: int
) -> None:
    exact(train, ranks, f"strategy=pp strategy.schedule={schedule}", common=f"loop.micro_batches={micro_batches}")


FOUR = "strategy=ddp_pp strategy.pipe=2 strategy.activation_checkpointing=units strategy.schedule="
SHARDED = "strategy=fsdp_pp strategy.pipe=2"
TENSOR = "strategy=mesh strategy.pipe=2 strategy.tensor=2 strategy.schedule="
# (network, processes, words): stages beside other axes, blocks cut between them, recomputing
CASES: list[tuple[type[nn.Module], int, str]] = [
    (Blocks, 2, "strategy=pp"),
    (Layers, 4, f"{SHARDED} strategy.reshard_after_forward=true"),
    (Layers, 4, f"{TENSOR}ZBVZeroBubble"),
    (Layers, 4, f"{SHARDED} strategy.schedule=LoopedBFS strategy.reshard_after_forward=true"),
    (Blocks, 4, f"{FOUR}Interleaved1F1B"),
    (Blocks, 4, f"{TENSOR}ZBVZeroBubble"),
    (Blocks, 4, f"{SHARDED} strategy.reshard_after_forward=true"),
]


@pytest.mark.parametrize(
    ("network", "ranks", "words"),
    [pytest.param(*case, marks=pytest.mark.long) if case != CASES[0] else case for case in CASES],
)
def test_what_else_there_is_changes_nothing(train: Train, network: Any, ranks: int, words: str) -> None:
    skip_what_is_refused(words)
    exact(train, ranks, words, network)


class Drawing(nn.Module):
    """Dropout in its blocks; outside of them, too, before a number that decides whether a block counts half."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.4)) for _ in range(4))
        self.last = nn.Linear(12, 4)

    def forward(self, inputs: Any) -> Tensor:
        hidden = inputs["x"]
        for block in self.blocks:
            hidden = F.dropout(hidden, 0.3, self.training)
            half = self.training and torch.rand([]) < 0.5
            hidden = 0.5 * block(hidden) if half else block(hidden)
        return self.last(hidden + 0.1 * torch.rand_like(hidden))

    def plan(self) -> Plan:
        return Plan(shard=("blocks.*",))


@pytest.mark.parametrize(
    "words",
    quickly(
        ["InterleavedZeroBubble", "Interleaved1F1B strategy.activation_checkpointing=units"],
        "Interleaved1F1B strategy.activation_checkpointing=units",
    ),
)
def test_what_is_drawn_is_that_of_one_process(train: Train, words: str) -> None:
    exact(train, 2, f"strategy=pp strategy.schedule={words}", Drawing)


@pytest.mark.parametrize(
    ("network", "words", "precision"),
    quickly(
        [
            (Layers, "strategy=pp", "fp16"),
            (Blocks, "strategy=pp", "bf16"),
            (Layers, SHARDED, "bf16"),
            (Blocks, f"{SHARDED} strategy.param_dtype=bf16", "fp32"),
        ],
        (Layers, "strategy=pp", "fp16"),
    ),
)
def test_half_precision_travels_between_stages(train: Train, network: Any, words: str, precision: str) -> None:
    parts: dict[str, Any] = {"model": network, **({} if network is Blocks else {"data": NamedData})}
    common = f"{SGD} loop.steps=3 loop.global_batch=24 precision={precision} loop.micro_batches=4"
    seen = train(f"{common} {words}", 4 if "fsdp" in words else 2, **parts)
    assert far(seen.losses, train(common, **parts).losses) < 5e-3


PP, V, INTERLEAVED = "strategy=pp", "strategy.schedule=ZBVZeroBubble", "strategy.schedule=Interleaved1F1B"
# the processes, words, and those of the refusal
REFUSED: list[tuple[int, str, str]] = [
    (1, PP, "a pipeline has 2 ranks or more, here pipe 1"),
    (4, "strategy=ddp_pp strategy.pipe=3", "4 processes / (strategy.pipe 3"),
    (2, f"{PP} strategy.stages_per_rank=2", "stages_per_rank=2: 1F1B wants 1; strategy.schedule=Interl"),
    (2, f"{PP} {INTERLEAVED} loop.micro_batches=5 loop.global_batch=40", "nearest: loop.micro_batches=2 or 4; G"),
    (2, f"{PP} {V} strategy.activation_checkpointing=operators", "activation_checkpointing=operators: ZBVZero"),
    (4, f"{PP} strategy.schedule=LoopedBFS", "has parts for 4 stages, 8 were asked for"),
    (2, f"{PP} loop.uneven=true", "loop.uneven=true: a pipeline's micro-batches are of one size; strategy=ddp or"),
    (2, f"{PP} compile.mode=default {V}", "compile.mode=default: ZBVZeroBubble computes"),
    (2, f"{PP} compile.mode=reduce-overhead", "CUDA graphs keep one micro-batch, and"),
]


@pytest.mark.parametrize(("ranks", "words", "said"), REFUSED)
def test_what_a_pipeline_cannot_do_is_refused(train: Train, ranks: int, words: str, said: str) -> None:
    skip_what_is_refused(words)
    assert said in train.refused(f"loop.micro_batches=4 {words}", ranks, model=Layers, data=NamedData)


def test_values_without_a_gradient_that_are_used_again_end_in_words(tmp_path: Path) -> None:
    """Only the last stage knows; a launcher tells what has failed first."""
    words = typed("strategy=pp loop.micro_batches=4 device=cpu log=[] run.dir=run", model=Recalling, data=NamedData)
    said = run(words, 2, "process", place=tmp_path, code=1).out
    assert "what a stage hands on needs what only an earlier stage knows" in said
