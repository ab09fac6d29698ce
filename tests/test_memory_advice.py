"""How much one forward computes, and what a run says where the memory does not suffice for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer.configuration.compose import compose
from trainer.jobs import fit
from trainer.jobs.run_parts import assemble
from trainer.launch.failure import RunFailed
from trainer.launch.rendezvous import Launch

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


class Room(nn.Module):
    """A classifier of digits that notes how many samples it is given at once, and has memory for so many."""

    def __init__(self, training: int, evaluating: int, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.most = {True: training, False: evaluating}
        self.seen: dict[bool, list[int]] = {True: [], False: []}
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self.training].append(len(x))
        if len(x) > self.most[self.training]:
            raise self.error
        return self.head(x.flatten(1))


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Room, str]]:
    """Run words as the command line does, but stay: the network, and what is said where its memory runs out."""
    said: list[str] = []
    monkeypatch.setattr(fit.rank_output, "redirect_output", lambda *_: None)

    def run(
        *words: str,
        training: int = 10**9,
        evaluating: int = 10**9,
        error: Exception = NO_MEMORY,
    ) -> tuple[Room, str]:
        words = (f"run.dir={tmp_path}/{len(words)}-{len(said)}", "device=cpu", "loop.steps=1", "log=[]", *words)
        parts, room = assemble(compose(words), words, [], Launch()), Room(training, evaluating, error)
        parts.make_network = lambda: room
        try:
            parts.job(parts)
        except RunFailed as failed:
            known = any(word in str(failed.__cause__) for word in ("memory", "ALLOC", "deterministic"))
            assert known or failed.remedy == "", failed.__cause__  # noqa: PT017 (whether it fails is what is asked)
            said.append(failed.remedy)
        return room, said.pop() if said else ""

    return run


def test_an_evaluation_forward_is_cut_as_a_training_forward_is(train: Callable[..., tuple[Room, str]]) -> None:
    room, _ = train("loop.global_batch=64", "loop.micro_batches=4")
    assert max(room.seen[True]) == 16
    assert max(room.seen[False]) == 64  # of 256, also in the rehearsal
    # a micro-batch and one sample, to compare the shapes of metrics; the rehearsal; and every sample once
    assert sum(room.seen[False]) == 64 + 1 + 256 + 360
    room, _ = train("loop.global_batch=64", "loop.micro_batches=4", "loop.eval_batch=40")
    assert max(room.seen[False]) == 10


@pytest.mark.parametrize(
    ("words", "room", "said"),
    [
        (["loop.global_batch=64"], {"training": 32}, "with 64 samples × 1 .* Try loop.micro_batches=2."),
        (["loop.global_batch=64", "loop.micro_batch=16"], {"training": 8}, "Try loop.micro_batch=8."),
        (["loop.global_batch=8", "loop.micro_batches=8"], {"training": 0}, "no smaller micro-batches; strategy=fsdp"),
        (["loop.global_batch=64"], {"evaluating": 128}, "256 samples at once .* Try loop.eval_batch=128."),
        (["loop.eval_batch=6", "loop.micro_batches=2"], {"evaluating": 1}, "3 samples at once .*eval_batch=2."),
        (["loop.eval_batch=4000"], {"evaluating": 180}, "360 samples at once .* Try loop.eval_batch=180."),
        (["loop.eval_batch=1"], {"evaluating": 0}, "There is no less; strategy=fsdp"),
    ],
)  # fmt: skip
def test_where_memory_runs_out_the_key_that_helps_is_named(
    train: Callable[..., tuple[Room, str]], words: list[str], room: dict[str, int], said: str
) -> None:
    _, note = train(*words, **room)
    assert len(note.splitlines()) == 1
    assert re.search(said, note), note


@pytest.mark.parametrize(
    "error",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that it is out of shared memory.",
        "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
    ],
)
def test_what_gives_workers_more_shared_memory_is_named(train: Callable[..., tuple[Room, str]], error: str) -> None:
    _, note = train("loop.global_batch=64", training=32, error=RuntimeError(error))
    assert "docker run --shm-size=8g" in note
    assert "loader.workers=0" in note


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (MemoryError("no memory"), 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 1),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, marks=pytest.mark.long),
        pytest.param(
            RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GiB, other allocations: 2.29 GiB)"),
            1,
            marks=pytest.mark.long,
        ),
        (ValueError("no"), 0),
    ],
)
def test_every_way_to_say_that_memory_ran_out_is_understood(
    train: Callable[..., tuple[Room, str]], error: Exception, count: int
) -> None:
    _, note = train("loop.global_batch=64", training=32, error=error)
    assert note.count("Try loop.micro_batches=2.") == count


def test_an_operation_without_a_deterministic_algorithm_ends_the_run_and_the_key_is_named(
    train: Callable[..., tuple[Room, str]],
) -> None:
    numbers = torch.zeros(2)
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError) as caught:
            numbers.put_(torch.zeros(1, dtype=torch.long), numbers[:1])
        _, note = train("loop.deterministic=true", training=1, error=caught.value)
        assert note.startswith("loop.deterministic=true runs no operation whose bits may differ")
    finally:
        torch.use_deterministic_algorithms(False)
