"""Checkpoints are whole or absent, verified before use, and readable by any number of processes."""

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager, CorruptCheckpoint, Disk, FailedSave
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine


def some_tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=random).to(memory_format=torch.channels_last),
        "fc.weight": torch.randn(5, 7, generator=random),
        "count": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
        "half": torch.randn(3, generator=random).bfloat16(),
        "optimizer/fc.weight/exp_avg": torch.randn(5, 7, generator=random),
        "optimizer/fc.weight/step": torch.tensor(float(seed)),
        "scaler/scale": torch.tensor(65536.0),
    }


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def checkpoints(folder, **options):
    return CheckpointManager(folder / "checkpoints", Ranks(), **options)


def save_some(folder, steps, **options):
    store = checkpoints(folder, **options)
    for step in steps:
        store.save(step, some_tensors(step), {"step": step})
    return [store.folder / f"step-{step:08d}" for step in steps]


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------------ there and back again


def test_what_was_saved_is_read_bit_for_bit(tmp_path):
    store, tensors = checkpoints(tmp_path, facts={"strategy": "single"}), some_tensors(3)
    tensors |= {"tied": tensors["fc.weight"], "row": tensors["fc.weight"][0], "turned": tensors["fc.weight"].t()}
    state = {"seen": 2**53 + 1, "lr": 0.1 + 0.2, "bad": [float("nan"), float("inf")], "name": "é 目", "no": None}
    store.save(100, tensors, state, {"loss": 0.5, "accuracy": 0.25})
    found = checkpoints(tmp_path).newest()
    into = zeros_like(tensors)
    store.read(found, into)
    assert found.path == tmp_path / "checkpoints" / "step-00000100"
    assert all(torch.equal(into[name], tensors[name]) and into[name].dtype == tensors[name].dtype for name in tensors)
    assert into["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert str(found.state.pop("bad")) == "[nan, inf]"
    assert found.state == {key: value for key, value in state.items() if key != "bad"}
    assert (found.step, found.facts) == (100, {"world_size": 1, "strategy": "single"})
    assert found.metrics == {"loss": 0.5, "accuracy": 0.25}
    assert (found.tensors["fc.weight"].shape, found.tensors["half"].dtype) == ((5, 7), torch.bfloat16)


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_tensor_is_touched(tmp_path):
    store = checkpoints(tmp_path)
    assert store.newest() is None
    with pytest.raises(FailedSave, match="Tensor is not JSON serializable"):
        store.save(1, {}, {"a": [1, torch.tensor(1)]})
    store.save(1, some_tensors(1), {})
    into = zeros_like(some_tensors(1))
    into["fc.weight"] = torch.zeros(5, 8)
    with pytest.raises(CorruptCheckpoint, match=r"Size mismatch .*5, 7.*5, 8.* for fc.weight"):
        store.read(store.newest(), into)
    into["new"] = into.pop("fc.weight")
    with pytest.raises(CorruptCheckpoint, match=r"Missing key .*: new"):
        store.read(store.newest(), into)
    assert all(not tensor.any() for tensor in into.values())
    # what is not asked for may stay there
    network = {name: tensor for name, tensor in zeros_like(some_tensors()).items() if "/" not in name}
    store.read(store.newest(), network)
    assert torch.equal(network["fc.weight"], some_tensors(1)["fc.weight"])


def test_the_step_in_the_manifest_decides_not_times_nor_names(tmp_path):
    one, two = save_some(tmp_path, [1, 2])
    os.rename(one, tmp_path / "checkpoints" / "step-99999999")
    os.utime(tmp_path / "checkpoints" / "step-99999999", (2**31, 2**31))
    os.utime(two, (10**9, 10**9))
    assert checkpoints(tmp_path).newest().step == 2


# -------------------------------------------------------------------------------------------------------------- damage


def tensors_of(path):
    return min(path.glob("*.safetensors"))


def folder_for_file(path):
    (path / "state.json").unlink()
    (path / "state.json").mkdir()


DAMAGE = {
    "a byte less": lambda path: os.truncate(tensors_of(path), tensors_of(path).stat().st_size - 1),
    "tensors lost": lambda path: tensors_of(path).unlink(),
    "manifest lost": lambda path: (path / "manifest.json").unlink(),
    "state lost": lambda path: (path / "state.json").unlink(),
    "tensors too many": lambda path: shutil.copy(tensors_of(path), path / "extra.safetensors"),
    "a folder for a file": folder_for_file,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_one_warning(tmp_path, caplog, damage):
    _, newest = save_some(tmp_path, [1, 2])
    DAMAGE[damage](newest)
    assert checkpoints(tmp_path).newest().step == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step-00000002" in record.getMessage()


def test_where_all_are_damaged_that_is_an_error_and_no_fresh_start(tmp_path):
    for path in save_some(tmp_path, [1, 2, 3]):
        DAMAGE["a byte less"](path)
    with pytest.raises(
        CorruptCheckpoint, match=r"none of the 3 checkpoints .*run\.resume=fresh starts over:"
    ) as caught:
        checkpoints(tmp_path).newest()
    assert [re.findall(r"step-0000000(\d)", line) for line in str(caught.value).splitlines()[1:]] == [
        [step] for step in "321"
    ]


def test_every_single_flipped_bit_is_found(tmp_path):
    (path,) = save_some(tmp_path, [1])
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    dice, store = random.Random(0), checkpoints(tmp_path)
    for _ in range(60):
        file = dice.choices(files, weights=sizes)[0] if dice.random() < 0.5 else dice.choice(files)
        data = bytearray(file.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        original = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=re.escape(str(file))):
            store.newest()
        file.write_bytes(original)
    assert store.newest().step == 1


def forge(path, file, data):
    """Put other bytes in a file and make the manifest agree."""
    file.write_bytes(data)
    fields = json.loads((path / "manifest.json").read_text())
    fields["files"][file.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    fields["files"], _ = dict(sorted(fields["files"].items())), fields.pop("sha256")

    def encoded(fields):
        return json.dumps(fields, indent=1, ensure_ascii=False).encode() + b"\n"

    text = encoded({**fields, "sha256": hashlib.sha256(encoded(fields)).hexdigest()})
    (path / "manifest.json").write_bytes(text)


def header_of(entries, data=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
HEADERS = {
    "a length beyond the file": (10**15).to_bytes(8, "little") + b"{}",
    "an unknown type": header_of({"a": {**ENTRY, "dtype": "PICKLE"}}, b"x"),
    "a hole": header_of(
        {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [10**12]}})}, "a": ENTRY}, b"x"
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, name):
    (path,) = save_some(tmp_path, [1])
    forge(path, tensors_of(path), HEADERS[name])
    with pytest.raises(CorruptCheckpoint, match="none of the"):
        checkpoints(tmp_path).newest()


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def as_torch_saves(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


CALLED = b'{"progress": {"_target_": "os.system", "_args_": ["touch canary"]}}'
PAYLOADS = {"pickle": pickle.dumps, "torch.save": as_torch_saves, "a call": lambda _: CALLED}
CRAFTED = [  # pairs: the last file is what torch's own format unpickles
    *(("pickle", "*model-00001*"), ("torch.save", "*model-00002*"), ("torch.save", ".metadata")),
    *(("pickle", ".metadata"), ("pickle", "state.json"), ("a call", "state.json")),
]


@pytest.mark.parametrize(("payload", "file"), CRAFTED)
def test_nothing_that_was_crafted_runs_code(tmp_path, monkeypatch, file, payload):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # whoever sets this trusts what he loads himself
    monkeypatch.setenv("HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE", "*")
    _, newest = save_some(tmp_path, [1, 2])
    assert {file.suffix for file in newest.iterdir()} == {".json", ".safetensors"}
    forge(newest, next(newest.glob(file), newest / file), PAYLOADS[payload](Hostile(tmp_path / "canary")))
    store = checkpoints(tmp_path, required_state=("progress",))
    with contextlib.suppress(CorruptCheckpoint):  # neither has what a run needs to go on from
        store.newest()
    found = checkpoints(tmp_path).newest()
    store.read(found, into := zeros_like(some_tensors()))
    assert found.step == 1 or file in (".metadata", "state.json")
    assert torch.equal(into["fc.weight"], some_tensors(found.step)["fc.weight"])
    assert not (tmp_path / "canary").exists()


# ----------------------------------------------------------------------------------------------- what stays, what goes


def test_the_newest_few_and_the_best_stay(tmp_path):
    store = checkpoints(tmp_path, keep=2, best="accuracy")
    for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.7), (4, None), (5, float("nan")), (6, 0.9)]:
        figures = None if accuracy is None else {"accuracy": accuracy}
        assert store.is_best(figures) == (step in (1, 2))
        store.save(step, some_tensors(step), {}, metrics=figures)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]  # of equals the newest
    again = checkpoints(tmp_path, keep=2, best="accuracy")
    again.newest()
    assert (again.is_best({"accuracy": 0.9}), again.is_best({"accuracy": 0.91})) == (False, True)


@pytest.mark.parametrize(("prefix", "best"), [("", "accuracy"), ("ema_", "ema_accuracy"), ("", "-error")])
def test_of_equal_figures_the_loss_decides_and_then_the_newer(tmp_path, prefix, best):
    # a figure that stays the same; the loss of the same network; the other network's, which says nothing
    other, figure = "loss" if prefix else "ema_loss", best.removeprefix("-")
    store, stayed = checkpoints(tmp_path, keep=1, best=best), []
    for step, loss in [(1, 0.4), (2, 0.1), (3, 0.2), (4, float("nan")), (5, 0.1), (6, 0.3)]:
        figures = {figure: 1.0, f"{prefix}loss": loss, other: -step}
        assert store.is_best(figures) == (step in (1, 2))
        assert store.improves(figures) == (step == 1)
        store.save(step, some_tensors(step), {}, metrics=figures)
        stayed.append({int(name[-1]) for name in names(tmp_path)})
    assert stayed == [{1}, {2}, {2, 3}, {2, 4}, {5}, {5, 6}]


def test_what_is_damaged_neither_pushes_out_nor_replaces_what_is_valid(tmp_path):
    store = checkpoints(tmp_path, keep=2)
    store.save(1, some_tensors(1), {})
    for step in (7, 8):  # torn
        shutil.copytree(store.folder / "step-00000001", store.folder / f"step-0000000{step}")
        DAMAGE["manifest lost"](store.folder / f"step-0000000{step}")
    store.save(9, some_tensors(9), {})
    file = tensors_of(store.folder / "step-00000009")
    file.write_bytes(file.read_bytes()[:-1] + b"?")  # whole, as far as sizes tell
    store = checkpoints(tmp_path, keep=2)
    assert store.newest().step == 1
    store.save(2, some_tensors(2), {})
    assert {"step-00000001", "step-00000002"} < set(names(tmp_path))
    store.save(9, some_tensors(9), {})  # written anew it counts, and goes as others do
    assert checkpoints(tmp_path).newest().step == 9
    store.save(10, some_tensors(10), {})
    assert names(tmp_path) == ["step-00000007", "step-00000008", "step-00000009", "step-00000010"]
    checkpoints(tmp_path, keep=1).save(3, some_tensors(3), {})  # beside newer ones of another start
    assert "step-00000003" in names(tmp_path)


def test_the_same_step_again_takes_the_place_of_the_old_one_and_leftovers_of_dead_attempts_go(tmp_path):
    store = checkpoints(tmp_path)
    for which in ("old", "new"):
        store.save(1, some_tensors(1), {"which": which})
    assert names(tmp_path) == ["step-00000001"]
    (store.folder / ".tmp-step-2-abc").mkdir()
    (store.folder / ".trash-step-00000000.abc").mkdir()
    os.rename(store.folder / "step-00000001", store.folder / ".replaced-step-00000001.abc")  # it gets its name back
    assert checkpoints(tmp_path).newest().state == {"which": "new"}
    assert names(tmp_path) == ["step-00000001"]


def test_what_lies_elsewhere_is_left_out_until_something_of_it_has_changed(tmp_path):
    def held(step):
        return {name for file in (own.folder / f"step-0000000{step}").glob("*.safetensors") for name in load_file(file)}

    own, every, frozen = checkpoints(tmp_path), some_tensors(1), ["fc.weight", "half"]
    shapes = {name: [*every[name].shape] for name in frozen}
    base = SimpleNamespace(shapes=shapes, fields={"path": "/published", "files": {"a": "0" * 64}, "tensors": shapes})
    assert own.begin_with(None, {name: every[name] for name in frozen}) == 5 * 7 * 4 + 3 * 2  # bytes in each checkpoint
    assert own.begin_with(base, {name: every[name] for name in frozen}) == 0
    own.save(1, every, {}, frozen=frozen)
    assert held(1) == every.keys() - {*frozen}
    own.read(own.newest(), into := zeros_like(every))
    assert into.keys() == held(1)  # the network has the others already
    changed = {**every, "half": every["half"].flip(0)}  # the same numbers in other places
    own.save(2, changed, {}, frozen=frozen)
    own.save(3, every, {}, frozen=frozen)  # from then on checkpoints hold all
    assert held(2) == held(3) == every.keys()
    own.read(own.newest(), into := zeros_like(every))
    assert torch.equal(into["half"], every["half"])


# -------------------------------------------------------------------------------------------------- when writing fails


class Small(Disk):
    """It has no room for a checkpoint."""

    def free(self, folder):
        return 5000


class Failing(Disk):
    """One kind of call fails for one file; before that it keeps account of what was asked, in its order."""

    def __init__(self, verb="", file=""):
        self.verb, self.file, self.asked = verb, file, []

    def _ask(self, verb, path):
        self.asked.append((verb, re.sub(r"^\.tmp-.*", "draft", path.name)))
        if verb == self.verb and self.file in path.name:
            raise OSError(5, "Input/output error", str(path))

    def write(self, path, data):
        self._ask("write", path)
        super().write(path, data)

    def write_tensors(self, path, tensors, metadata):
        self._ask("write", path)
        super().write_tensors(path, tensors, metadata)

    def sync(self, path):
        self._ask("sync", path)
        super().sync(path)

    def rename(self, path, target):
        self._ask("rename", path)
        super().rename(path, target)


def test_too_little_space_is_said_before_writing(tmp_path):
    save_some(tmp_path, [1])
    needs = r"step 2 .*checkpoints: .*No space left.* needs about 1,\d+,\d+ bytes, 5,000 are free"
    with pytest.raises(FailedSave, match=needs):
        save_some(tmp_path, [2], disk=Small())
    assert names(tmp_path) == ["step-00000001"]


FAULTS = [("write", "model-00001"), ("write", "state.json"), ("write", "manifest.json"), ("sync", "model-00002")]


@pytest.mark.parametrize(("verb", "file"), [*FAULTS, ("sync", ".tmp-step-2"), ("rename", ".tmp-step-2")])
def test_a_write_that_fails_leaves_the_older_ones_and_no_draft(tmp_path, verb, file):
    save_some(tmp_path, [1])
    with pytest.raises(FailedSave, match=r"step 2 could not be written to .*Input/output error.* are intact"):
        save_some(tmp_path, [2], disk=Failing(verb, file))
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints(tmp_path).newest().step == 1


def test_everything_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    disk, flushed, fsync = Failing(), [], os.fsync

    def counted(file):
        flushed.append(file)
        fsync(file)

    monkeypatch.setattr(os, "fsync", counted)
    save_some(tmp_path, [1], disk=disk)
    assert len(flushed) == len([verb for verb, _ in disk.asked if verb == "sync"])  # the system was told, each time
    files = sorted(path.name for path in (tmp_path / "checkpoints" / "step-00000001").iterdir())
    at = {asked: number for number, asked in enumerate(disk.asked)}
    for file in files:
        assert at["write", file] < at["sync", file] < at["sync", "draft"]
        assert at["sync", file] <= at["sync", "manifest.json"]  # it is the last
    assert at["sync", "draft"] < at["rename", "draft"] < at["sync", "checkpoints"] == len(disk.asked) - 1


# ------------------------------------------------------------------------------------------------------- two processes


def whole_tensors():
    random = torch.Generator().manual_seed(7)
    shapes = {"column": (5, 4), "one_row": (1, 4), "row": (3, 6), "replicated": (4,), "plain": (6, 2)}
    shapes |= {"optimizer/column/exp_avg": (5, 4), "optimizer/plain/exp_avg": (6, 2)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def split_tensors(whole):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    styles = {"column": Shard(0), "one_row": Shard(0), "row": Shard(1), "replicated": Replicate()}
    styles["optimizer/column/exp_avg"] = Shard(0)
    return {
        name: distribute_tensor(tensor, mesh, [styles[name]]) if name in styles else tensor.clone()
        for name, tensor in whole.items()
    }


def equal(tensors, whole):
    return all(
        torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, whole[name])
        for name, tensor in tensors.items()
    )


def exchange(launch, folder):
    """Read what one process wrote, write sharded and replicated, fail together, fall back together."""
    with DDP(machine=Machine(launch=launch, device="cpu", precision="fp32")) as strategy:
        ranks, whole = strategy.world, whole_tensors()
        one = CheckpointManager(folder / "one", ranks)
        split = split_tensors(zeros_like(whole))
        one.read(one.newest(), split)
        assert equal(split, whole)

        two = CheckpointManager(folder / "two", ranks, facts={"strategy": "tp"})
        for step in (1, 2):
            two.save(step, split, {"step": step}, {"loss": 1.0})
        assert list((folder / "two" / "step-00000002").glob("shard-00002-*"))  # both ranks wrote
        found, again = two.newest(), split_tensors(zeros_like(whole))
        assert found.facts == {"world_size": 2, "strategy": "tp"}
        two.read(found, again)
        assert equal(again, whole)
        ranks.barrier()
        if ranks.is_main:
            DAMAGE["a byte less"](folder / "two" / "step-00000002")
        ranks.barrier()
        assert CheckpointManager(folder / "two", ranks).newest().step == 1
        for verb in ("write", "sync"):  # an error that only one rank has
            disk = Failing(verb if launch.rank == 1 else "", "model")
            with pytest.raises(FailedSave, match="Input/output error"):
                CheckpointManager(folder / "two", ranks, disk=disk).save(3, split, {})
            ranks.barrier()
            assert sorted(os.listdir(folder / "two")) == ["step-00000001", "step-00000002"]
        three = CheckpointManager(folder / "three", ranks)
        three.save(1, whole, {})  # nothing sharded: the main rank writes alone
        assert not list((folder / "three").glob("*/shard-00002-*"))
        three.read(three.newest(), into := zeros_like(whole))
        assert equal(into, whole)


def test_one_process_and_two_read_what_the_other_wrote(processes, tmp_path):
    whole = whole_tensors()
    CheckpointManager(tmp_path / "one", Ranks()).save(1, whole, {})
    processes.run(2, exchange, tmp_path)
    shutil.rmtree(tmp_path / "two" / "step-00000002")
    for folder in ("two", "three"):
        store, into = CheckpointManager(tmp_path / folder, Ranks()), zeros_like(whole)
        found = store.newest()
        store.read(found, into)
        assert equal(into, whole)
        assert found.tensors.keys() == whole.keys()
        assert found.tensors["one_row"].shape == (1, 4)
