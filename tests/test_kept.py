"""What nothing trains is written once, and every checkpoint is whole all the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands import TRANSFORMER, curve
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_initial_weights import equal, saved
from trainer.launch.rendezvous import Launch
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import CorruptCheckpoint
from trainer.records.checkpoint.store import open_checkpoint


def state(step: int = 0) -> dict[str, Tensor]:
    """What learns, and what does not: of several types, one in parts that do not lie in order, one with two names."""
    random = torch.Generator().manual_seed(0)
    table = torch.randn(300, 7, generator=random)
    frozen = {"table": table, "tied": table, "turned": table.T, "half": table.bfloat16(), "mask": table > 0}
    return {"head": torch.full((3,), float(step)), **frozen}


FROZEN = sorted(state().keys() - {"head"})


def store(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, Ranks(), **options)


def inodes(folder: Path) -> list[set[int]]:
    """Where the frozen tensors of each checkpoint lie on the disk."""
    return [{file.stat().st_ino for file in path.glob("frozen-*")} for path in sorted(folder.glob("step-*"))]


def test_each_checkpoint_is_whole_and_the_bytes_are_there_once(tmp_path: Path) -> None:
    one = store(tmp_path, keep=2)
    for step in (1, 2, 3):
        one.save(step, state(step), {}, frozen=FROZEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    (first,), (second,) = inodes(tmp_path)
    assert first == second
    # copied alone, and read there
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "step-00000002")
    for path in (tmp_path / "elsewhere" / "copy", tmp_path / "step-00000003"):
        found = open_checkpoint(path, Ranks())
        into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        one.read(found, into)
        assert equal(into, state(found.step))
    # what a later start has read it need not write, wherever it goes on
    for folder in (tmp_path, tmp_path / "new"):
        later = store(folder)
        later.read(open_checkpoint(tmp_path / "step-00000003", Ranks()), state())
        later.save(4, state(4), {}, frozen=FROZEN)
    assert inodes(tmp_path) == [{first}] * 2
    assert inodes(tmp_path / "new") == [{first}]


def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["table"][[0, 1]] = tensors["table"][[1, 0]]  # the same numbers in other places
    return tensors


CHANGES: dict[str, Any] = {
    "a number": lambda tensors: {**tensors, "half": tensors["half"].clone().index_fill(0, torch.tensor([5]), 0)},
    "the order": swapped,
    "one less": lambda tensors: {name: one for name, one in tensors.items() if name != "mask"},
    "one more": lambda tensors: {**tensors, "more": torch.ones(2)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_written_again(tmp_path: Path, change: str) -> None:
    own, other = store(tmp_path), CHANGES[change](state(2))
    own.save(1, state(1), {}, frozen=FROZEN)
    own.save(2, other, {}, frozen=[*FROZEN, "more"])
    own.save(3, other, {}, frozen=[*FROZEN, "more"])
    first, second, third = inodes(tmp_path)
    assert first != second == third
    into = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
    own.read(own.newest(), into)
    assert equal(into, other)


def test_a_damaged_file_is_found_and_one_that_cannot_be_shared_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = store(tmp_path)
    own.save(1, state(1), {}, frozen=FROZEN)
    (file,) = (tmp_path / "step-00000001").glob("frozen-*")
    assert not file.stat().st_mode & 0o222
    # a file system without links; and a checkpoint that somebody has removed
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
        own.save(2, state(2), {}, frozen=FROZEN)
    shutil.rmtree(tmp_path / "step-00000002")
    own.save(3, state(3), {}, frozen=FROZEN)
    own.save(4, state(4), {}, frozen=FROZEN)
    first, third, fourth = inodes(tmp_path)
    assert first != third == fourth
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-0000000{step}" for step in (1, 3, 4)]
    data = bytearray(next((tmp_path / "step-00000004").glob("frozen-*")).read_bytes())
    data[-1] ^= 1
    (shared,) = (tmp_path / "step-00000004").glob("frozen-*")
    shared.chmod(0o644)
    shared.write_bytes(data)
    for step in (3, 4):
        with pytest.raises(CorruptCheckpoint, match=r"frozen-00001\.safetensors: SHA-256 differs"):
            open_checkpoint(tmp_path / f"step-0000000{step}", Ranks())
    assert store(tmp_path).newest().step == 1


WORDS = (
    *(*TRANSFORMER, "model.freeze=[backbone]", "loop.global_batch=120", "loop.log_every=1", "loop.eval_every=null"),
    *("loop.save_every=1", "checkpoint.keep=9", "precision=fp64"),
)


@pytest.mark.parametrize(
    ("strategy", "size"),
    quickly([("ddp", 2), ("zero1", 2), ("fsdp", 2), ("hsdp", 4), ("tp", 2), ("pp", 2)], ("fsdp", 2)),
)
def test_a_run_writes_its_backbone_once_whoever_goes_on(
    processes: Processes, tmp_path: Path, strategy: str, size: int
) -> None:
    more = {"hsdp": ["strategy.replicate=2"], "pp": ["loop.micro_batches=2"]}.get(strategy, [])
    words = [*WORDS, f"strategy={strategy}", *more]
    assert (
        processes.run(size, product, tmp_path, [*words, "run.dir=run", "loop.steps=3", "schedule=constant"])
        == [0] * size
    )
    spread = inodes(tmp_path / "run" / "checkpoints")
    assert len(spread) == 3
    assert spread[0] == spread[1] == spread[2] != set()
    # other processes go on, and share the same files
    alone = [*WORDS, "schedule=constant", "loop.steps=5"]
    assert product(Launch(), tmp_path, [*alone, "strategy=single", "run.dir=run"]) == 0
    assert inodes(tmp_path / "run" / "checkpoints") == [spread[0]] * 5
    assert product(Launch(), tmp_path, [*alone, "strategy=single", "run.dir=alone"]) == 0
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "alone"), abs=1e-12)
    ours, theirs = saved(tmp_path / "run"), saved(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-10
