"""Where memory does not suffice: how much one forward computes, and what the run says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.options import options
from tests.run import run

SEEN: dict[bool, list[int]] = {True: [], False: []}  # how many samples a network was given, training and evaluating
ERRORS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GiB, other allocations: 2.29 GiB)"),
    "worker": lambda: RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that it is out of shared memory."
    ),
    "bits": lambda: RuntimeError("put_ does not have a deterministic implementation, but you set 'torch.use_det…'"),
    "other": lambda: ValueError("no"),
}


class Room(nn.Module):
    """A classifier of digits that has memory for so many samples."""

    def __init__(self, training: int = 10**9, evaluating: int = 10**9, error: str = "memory") -> None:
        super().__init__()
        self.error, self.most = error, {True: training, False: evaluating}
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            SEEN[self.training].append(len(x))
        if len(x) > self.most[self.training]:
            raise ERRORS[self.error]()
        return self.head(x.flatten(1))


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., str]:
    """A step of it, and what is said where its memory runs out."""
    own = [*options(tmp_path, Room), "model=room", "loop.steps=1"]

    def train(*words: str, code: int = 1) -> str:
        for seen in SEEN.values():
            seen.clear()
        return run([*own, f"run.dir=run-{len(words)}", *words], place=tmp_path, code=code).out

    return train


def test_an_evaluation_forward_is_cut_as_a_training_forward_is(train: Any) -> None:
    train("loop.global_batch=64", "loop.micro_batches=4", code=0)
    assert max(SEEN[True]) == 16
    assert max(SEEN[False]) == 64  # of 256, also in the rehearsal
    # a micro-batch and one sample, to compare the shapes of metrics; the rehearsal; and every sample once
    assert sum(SEEN[False]) == 64 + 1 + 256 + 360
    train("loop.global_batch=64", "loop.micro_batches=4", "loop.eval_batch=40", code=0)
    assert max(SEEN[False]) == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loop.global_batch=64", "model.training=32"], "with 64 samples × 1 .* Try loop.micro_batches=2."),
        (["loop.global_batch=64", "loop.micro_batch=16", "model.training=8"], "Try loop.micro_batch=8."),
        (
            ["loop.global_batch=8", "loop.micro_batches=8", "model.training=0"],
            "no smaller micro-batches; strategy=fsdp",
        ),
        (["loop.global_batch=64", "model.evaluating=128"], "256 samples at once .* Try loop.eval_batch=128."),
        (["loop.eval_batch=6", "loop.micro_batches=2", "model.evaluating=1"], "3 samples at once .*eval_batch=2."),
        (["loop.eval_batch=4000", "model.evaluating=180"], "360 samples at once .* Try loop.eval_batch=180."),
        (["loop.eval_batch=1", "model.evaluating=0"], "There is no less; strategy=fsdp"),
    ],
)
def test_where_memory_runs_out_the_key_that_helps_is_named_in_one_line(train: Any, words: list[str], said: str) -> None:
    lines = [line for line in train(*words).splitlines() if re.search(said, line)]
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("error", "said"),
    [
        *((kind, "Try loop.micro_batches=2.") for kind in ("cublas", "cpu", "mps")),
        ("worker", "loader.workers=0"),
        ("bits", "loop.deterministic=true runs no operation whose bits may differ"),
    ],
)
def test_every_way_to_say_that_memory_ran_out_is_understood(train: Any, error: str, said: str) -> None:
    words = ["loop.global_batch=64", "model.training=32", f"loop.deterministic={error == 'bits'}"]
    assert said in train(*words, f"model.error={error}")


def test_of_another_error_nothing_is_advised(train: Any) -> None:
    assert "Try" not in train("loop.global_batch=64", "model.training=32", "model.error=other")
