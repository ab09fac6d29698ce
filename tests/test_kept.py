"""What nothing trains: every checkpoint holds it, or none does and all say where it lies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.commands import TRANSFORMER, curve, lines
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_initial_weights import equal, saved
from trainer.launch.rendezvous import Launch
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.base_weights import BaseWeights, base_of
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import encode_manifest, file_sha256, read_manifest
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


def held(path: Path) -> set[str]:
    """The names of the tensors in the files of a checkpoint."""
    return {name for file in path.glob("*.safetensors") for name in load_file(file)}


def test_each_checkpoint_holds_all_by_itself(tmp_path: Path) -> None:
    one = store(tmp_path / "run")
    assert one.begin_with(None, {name: state()[name] for name in FROZEN}) == sum(
        tensor.nbytes for name, tensor in state().items() if name in FROZEN
    )
    for step in (1, 2):
        one.save(step, state(step), {}, frozen=FROZEN)
    # copied alone, and read there
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run" / "step-00000002")
    for path in (tmp_path / "copy", tmp_path / "run" / "step-00000001"):
        assert all(file.stat().st_nlink == 1 for file in path.iterdir())
        found = open_checkpoint(path, Ranks())
        into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        one.read(found, into)
        assert equal(into, state(found.step))


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
def test_what_lies_elsewhere_is_left_out_until_something_of_it_has_changed(tmp_path: Path, change: str) -> None:
    own, other = store(tmp_path), CHANGES[change](state(2))
    base = BaseWeights(Path("/published"), {"a": "0" * 64}, {name: [*state()[name].shape] for name in FROZEN})
    assert own.begin_with(base, {name: state()[name] for name in FROZEN}) == 0
    own.save(1, state(1), {}, frozen=FROZEN)
    assert held(tmp_path / "step-00000001") == {"head"}
    assert base_of(open_checkpoint(tmp_path / "step-00000001", Ranks()).state) == base
    # from then on checkpoints hold all, also of a later start
    own.save(2, other, {}, frozen=[*FROZEN, "more"])
    own.save(3, state(3), {}, frozen=FROZEN)
    later, into = store(tmp_path), {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    later.begin_with(base, {name: state()[name] for name in FROZEN})
    later.read(open_checkpoint(tmp_path / "step-00000003", Ranks()), into)
    assert equal(into, state(3))
    later.save(4, state(4), {}, frozen=FROZEN)
    for step, tensors in ((2, other), (3, state()), (4, state())):
        assert held(tmp_path / f"step-0000000{step}") == tensors.keys()
        assert base_of(open_checkpoint(tmp_path / f"step-0000000{step}", Ranks()).state) is None


WORDS = (
    *(*TRANSFORMER, "model.freeze=[backbone]", "loop.global_batch=120", "loop.log_every=1", "loop.eval_every=null"),
    *("loop.save_every=1", "checkpoint.keep=9", "precision=fp64", "schedule=constant"),
)


@pytest.mark.parametrize(
    ("strategy", "size"),
    quickly([("ddp", 2), ("zero1", 2), ("fsdp", 2), ("hsdp", 4), ("tp", 2), ("pp", 2)], ("fsdp", 2)),
)
def test_a_run_writes_its_backbone_at_each_save_and_others_go_on_from_it(
    processes: Processes, tmp_path: Path, strategy: str, size: int
) -> None:
    more = {"hsdp": ["strategy.replicate=2"], "pp": ["loop.micro_batches=2"]}.get(strategy, [])
    words = [*WORDS, f"strategy={strategy}", *more]
    assert processes.run(size, product, tmp_path, [*words, "run.dir=run", "loop.steps=3"]) == [0] * size
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) == 3
    assert held(checkpoints[0]) == held(checkpoints[2]) > {"embed.weight"}
    alone = [*WORDS, "loop.steps=5"]
    assert product(Launch(), tmp_path, [*alone, "strategy=single", "run.dir=run"]) == 0
    assert product(Launch(), tmp_path, [*alone, "strategy=single", "run.dir=alone"]) == 0
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "alone"), abs=1e-12)
    ours, theirs = saved(tmp_path / "run"), saved(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-10


def as_of_old(checkpoints: Path) -> None:
    """As an older version wrote them: what is frozen in a file that all have a hard link to, and nobody may write."""
    shared: Path | None = None
    for path in sorted(checkpoints.iterdir()):
        model, frozen = path / "shard-00001-model-00001-of-00002.safetensors", path / "frozen-00001.safetensors"
        with safe_open(model, "pt") as opened:
            header = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        tensors = load_file(model)
        kinds = ({name for name in tensors if name.startswith("head.")}, model), (tensors.keys(), frozen)
        for names, file in kinds:
            part = {name: tensors.pop(name) for name in [*names]}
            offsets = json.dumps({name: header[name] for name in part})
            save_file(part, file, {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"})
        if shared is not None:
            frozen.unlink()
            os.link(shared, frozen)
        shared = frozen
        frozen.chmod(0o444)
        manifest = read_manifest(path)
        for file in (model, frozen):
            manifest.files[file.name] = {"size": file.stat().st_size, "sha256": file_sha256(file)}
        (path / "manifest.json").write_bytes(encode_manifest(manifest))


@pytest.mark.parametrize("mirrored", [False, True])
def test_checkpoints_that_share_a_file_are_opened_and_gone_on_from(
    tmp_path: Path, mirrored: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "strategy=single", f"run.root={tmp_path}"]
    assert here(*words, "run.name=whole", "loop.steps=5", "log=[console]") == 0
    size = 8 * sum(tensor.numel() for name, tensor in saved(tmp_path / "whole").items() if "head" not in name)
    told = f"note        every save writes the frozen weights again: {size:,} bytes\n"
    assert capsys.readouterr().out.count(told) == 1
    assert here(*words, "run.name=old", "loop.steps=3") == 0
    as_of_old(tmp_path / "old" / "checkpoints")
    if mirrored:  # another machine, which has the copies alone
        shutil.copytree(tmp_path / "old" / "checkpoints", tmp_path / "mirror" / "old")
        shutil.rmtree(tmp_path / "old")
        words += [f"checkpoint.mirror=file://{tmp_path}/mirror"]
    else:
        files = [path / "frozen-00001.safetensors" for path in sorted((tmp_path / "old" / "checkpoints").iterdir())]
        assert len({file.stat().st_ino for file in files}) == 1
    assert here(*words, "run.name=old", "loop.steps=5") == 0
    assert ("restored    step 3" in capsys.readouterr().out) == mirrored
    losses = [line["loss_hex"] for line in lines(tmp_path / "old", "train")]
    assert losses[-2:] == curve(tmp_path / "whole", "loss_hex")[-2:]
    assert equal(saved(tmp_path / "old"), saved(tmp_path / "whole"))
    last = sorted((tmp_path / "old" / "checkpoints").iterdir())[-1]
    assert not list(last.glob("frozen-*"))
