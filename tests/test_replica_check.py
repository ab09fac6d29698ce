"""A copy of the network that drifts is noticed, named, and never committed; copies that agree are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.tensor import DTensor

from recipes.vision.classification import Classification
from tests.options import options
from tests.ranks import Processes
from tests.run import Finished, quickly, run
from trainer import Plan


class Net(nn.Module):
    """`own`: a buffer that each rank has for itself."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 24), nn.Linear(24, 64)
        self.norm, self.head, self.own = nn.LayerNorm(64), nn.Linear(64, 10), own
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.own:
            self.centre += x.detach().mean()
        return self.head(self.norm(x + self.down(self.up(x).relu())))

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan(tensor={"up": ColwiseParallel(), "down": RowwiseParallel()}, cuts=("down",))


class Drifting(Classification):
    """In step 5 one rank changes a number of its own, by very little."""

    def __init__(self, rank: int = -1, tensor: str = "head.weight") -> None:
        super().__init__()
        self.rank, self.tensor = rank, tensor

    def after_step(self, network: nn.Module, step: int) -> None:
        if step == 5 and get_rank() == self.rank:
            value = dict(network.named_parameters())[self.tensor]
            (value.to_local() if isinstance(value, DTensor) else value).view(-1)[0] += 2**-20


@pytest.fixture
def train(processes: Processes, tmp_path: Path) -> Any:
    own = [*options(tmp_path, Net, Drifting), "model=net", "task=drifting", "loop.steps=12", "loop.global_batch=24"]
    own += ["loop.eval_every=null", "loop.save_every=4", "loop.log_every=2", "loop.micro_batches=2"]

    def train(ranks: int, *words: str, code: int = 0) -> Finished:
        return run([*own, "run.dir=run", *words], ranks, "group", place=tmp_path, code=code)

    return train


def saves(done: Finished) -> list[str]:
    return sorted(path.name for path in (done.folder / "checkpoints").iterdir())


def test_a_copy_that_drifts_ends_the_run_before_it_is_saved(train: Any) -> None:
    # found by a line, or by the next save where there is no line before it
    for log_every, found in (("2", 6), ("null", 8)):
        words = ["strategy=ddp", "task.rank=1", f"loop.log_every={log_every}", "run.resume=fresh"]
        done = train(2, *words, f"run.dir=every-{log_every}", code=1)
        assert (
            f"step {found}: the copies of the network have drifted apart: ranks 0, 1 hold different numbers (and nobody"
            " can say who is right) in head.weight."
        ) in done.out
        assert saves(done) == ["step-00000004"]
    # who wants it so says so
    assert "step-00000012" in saves(train(2, "strategy=ddp", "task.rank=1", "distributed.compare_copies=false"))


# strategy, ranks, the rank that changes a weight of its own, the tensor, and who is said to differ
SPREAD = [
    (["strategy=zero1"], 3, 0, "head.weight", "rank 0 on HOST holds other numbers than ranks 1, 2"),
    (["strategy=fsdp", "strategy.replicate=2"], 4, 3, "up.weight", "ranks 1, 3 hold different numbers"),
    (["strategy=ddp_tp", "strategy.tensor=2"], 4, 2, "up.weight", "ranks 0, 2 hold different numbers"),
    (["strategy=tp"], 3, 1, "norm.weight", "rank 1 on HOST holds other numbers than ranks 0, 2"),
    (["strategy=ddp_pp", "strategy.pipe=2"], 4, 1, "up.weight", "ranks 0, 1 hold different numbers"),
    (["strategy=fsdp_tp", "strategy.tensor=2"], 4, 1, "norm.bias", "ranks 0, 1 hold different numbers"),
]


@pytest.mark.parametrize(("words", "ranks", "wrong", "tensor", "who"), quickly(SPREAD, SPREAD[0], SPREAD[2]))
def test_of_copies_wherever_they_are_the_one_that_differs_is_named(
    train: Any, words: list[str], ranks: int, wrong: int, tensor: str, who: str
) -> None:
    said = train(ranks, *words, f"task.rank={wrong}", f"task.tensor={tensor}", "loop.log_every=5", code=1).out
    assert "step 5:" in said
    assert f"in {tensor}" in said
    assert all(part in said for part in who.split("HOST")), said


def test_a_buffer_that_differs_is_named_once(train: Any) -> None:
    done = train(2, "strategy=ddp", "model.own=true")
    log = (done.folder / "logs" / "rank-0.log").read_text()
    assert log.count("ranks hold different numbers in centre, as each has seen other samples") == 1
