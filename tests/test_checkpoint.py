"""Checkpoints are whole or absent, verified before use, and readable by any number of processes."""

import contextlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.quick import quickly
from trainer.messages import FatalRunError
from trainer.parallel.ranks import Group, Ranks
from trainer.records.checkpoint import store, tensor_files, writer
from trainer.records.checkpoint.manager import CheckpointManager, FailedSave
from trainer.records.checkpoint.manifest import CorruptCheckpoint, encode_manifest, read_manifest
from trainer.records.checkpoint.store import describe_damage, list_complete, open_checkpoint

ROOT = Path(__file__).parents[1]


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
    state = {
        "epoch": 2,
        "seen": 2**53 + 1,
        "lr": 0.1 + 0.2,
        "bad": [float("nan"), float("inf")],
        "name": "é 目",
        "no": None,
    }
    store.save(100, tensors, state, {"loss": 0.5, "accuracy": 0.25})
    found = checkpoints(tmp_path).newest()
    into = zeros_like(tensors)
    store.read(found, into)
    assert found.path == tmp_path / "checkpoints" / "step-00000100"
    assert all(torch.equal(into[name], tensors[name]) and into[name].dtype == tensors[name].dtype for name in tensors)
    assert into["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert str(found.state.pop("bad")) == "[nan, inf]"
    assert found.state == {key: value for key, value in state.items() if key != "bad"}
    assert (found.step, found.facts, found.metrics) == (
        100,
        {"world_size": 1, "strategy": "single"},
        {"loss": 0.5, "accuracy": 0.25},
    )
    assert found.tensors["fc.weight"].shape == (5, 7)
    assert found.tensors["half"].dtype == torch.bfloat16


def test_a_plain_network_loads_the_file_of_its_weights(tmp_path):
    from safetensors.torch import load_file

    network = nn.Linear(3, 2)
    checkpoints(tmp_path).save(1, {**network.state_dict(), "optimizer/weight/momentum": torch.zeros(2, 3)}, {})
    model_file = next((tmp_path / "checkpoints" / "step-00000001").glob("*-00001-of-00002.safetensors"))
    other = nn.Linear(3, 2)
    other.load_state_dict(load_file(model_file))
    assert torch.equal(other.weight, network.weight)


def test_names_that_share_their_memory_are_written_each(tmp_path):
    weight = torch.randn(4, 4)
    store = checkpoints(tmp_path)
    store.save(1, {"embed.weight": weight, "head.weight": weight, "row": weight[0], "turned": weight.t()}, {})
    into = {
        "embed.weight": torch.zeros(4, 4),
        "head.weight": torch.zeros(4, 4),
        "row": torch.zeros(4),
        "turned": torch.zeros(4, 4),
    }
    store.read(store.newest(), into)
    assert torch.equal(into["embed.weight"], weight)
    assert torch.equal(into["head.weight"], weight)
    assert torch.equal(into["row"], weight[0])
    assert torch.equal(into["turned"], weight.t())


def test_reading_never_unpickles(tmp_path, monkeypatch):
    (path,) = save_some(tmp_path, [1])
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was unpickled"))
    store, into = checkpoints(tmp_path), zeros_like(some_tensors())
    store.read(store.newest(), into)
    assert torch.equal(into["fc.weight"], some_tensors(1)["fc.weight"])


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_tensor_is_touched(tmp_path):
    store = checkpoints(tmp_path)
    store.save(1, some_tensors(1), {})
    into = zeros_like(some_tensors(1))
    into["fc.weight"] = torch.zeros(5, 8)
    with pytest.raises(CorruptCheckpoint, match=r"Size mismatch .*5, 7.*5, 8.* for fc.weight"):
        store.read(store.newest(), into)
    into["new"] = into.pop("fc.weight")
    with pytest.raises(CorruptCheckpoint, match=r"Missing key .*: new"):
        store.read(store.newest(), into)
    assert all(not tensor.any() for tensor in into.values())


def test_optimizer_tensors_may_be_left_in_the_checkpoint(tmp_path):
    store = checkpoints(tmp_path)
    store.save(1, some_tensors(1), {})
    into = {name: tensor for name, tensor in zeros_like(some_tensors()).items() if "/" not in name}
    store.read(store.newest(), into)
    assert torch.equal(into["fc.weight"], some_tensors(1)["fc.weight"])


def test_state_must_be_data(tmp_path):
    with pytest.raises(FailedSave, match="Tensor is not JSON serializable"):
        checkpoints(tmp_path).save(1, {}, {"a": [1, torch.tensor(1)]})


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoints(tmp_path).newest() is None
    assert checkpoints(tmp_path / "missing").newest() is None


def test_the_step_in_the_manifest_decides_not_times_nor_names(tmp_path):
    one, two = save_some(tmp_path, [1, 2])
    os.rename(one, tmp_path / "checkpoints" / "step-99999999")
    os.utime(tmp_path / "checkpoints" / "step-99999999", (2**31, 2**31))
    os.utime(two, (10**9, 10**9))
    assert checkpoints(tmp_path).newest().step == 2


def shorten(path):
    file = next(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def empty(path):
    os.truncate(next(path.glob("*.safetensors")), 0)


def lose_tensors(path):
    next(path.glob("*.safetensors")).unlink()


def lose_manifest(path):
    (path / "manifest.json").unlink()


def lose_state(path):
    (path / "state.json").unlink()


def add_tensors(path):
    shutil.copy(next(path.glob("*.safetensors")), path / "extra.safetensors")


def folder_for_file(path):
    (path / "state.json").unlink()
    (path / "state.json").mkdir()


MUTATIONS = [
    shorten,
    empty,
    lose_tensors,
    lose_manifest,
    lose_state,
    add_tensors,
    folder_for_file,
]


@pytest.mark.parametrize("damage", MUTATIONS)
def test_a_damaged_checkpoint_is_passed_over_with_one_warning(tmp_path, caplog, damage):
    _, newest = save_some(tmp_path, [1, 2])
    damage(newest)
    assert checkpoints(tmp_path).newest().step == 1
    (record,) = [record for record in caplog.records if record.name == store.__name__]
    assert record.levelno == logging.WARNING
    assert "step-00000002" in record.getMessage()
    with pytest.raises(CorruptCheckpoint, match="step-00000002"):
        open_checkpoint(newest, Ranks())


def test_where_all_are_damaged_that_is_an_error_and_no_fresh_start(tmp_path):
    for path in save_some(tmp_path, [1, 2, 3]):
        shorten(path)
    with pytest.raises(
        CorruptCheckpoint, match=r"none of the 3 checkpoints .*run\.resume=fresh starts over:"
    ) as caught:
        checkpoints(tmp_path).newest()
    assert len(str(caught.value).splitlines()) == 4
    assert isinstance(caught.value, FatalRunError)  # in words, without a traceback
    assert [Path(line.partition(":")[0]).parent.name[-1] for line in describe_damage(tmp_path / "checkpoints")] == list(
        "321"
    )


def test_every_single_flipped_bit_is_found(tmp_path):
    (path,) = save_some(tmp_path, [1])
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    dice = random.Random(0)
    for _ in range(100):
        file = dice.choices(files, weights=sizes)[0] if dice.random() < 0.5 else dice.choice(files)
        data = bytearray(file.read_bytes())
        position = dice.randrange(len(data))
        data[position] ^= 1 << dice.randrange(8)
        original = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=re.escape(str(file))):
            open_checkpoint(path, Ranks())
        file.write_bytes(original)
    assert open_checkpoint(path, Ranks()).step == 1


# -------------------------------------------------------------------------------------------------------- other headers


def forge(path, file, data):
    """Put other bytes in a file and make the manifest agree."""
    file.write_bytes(data)
    manifest = read_manifest(path)
    manifest.files[file.name] = writer._sync_and_hash(file)
    (path / "manifest.json").write_bytes(encode_manifest(manifest))


def header_of(entries, data=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


HEADERS = {
    "a length beyond the file": (10**15).to_bytes(8, "little") + b"{}",
    "an unknown type": header_of({"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "a pickle": pickle.dumps(print),
    "a hole": header_of(
        {
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [10**12]}})},
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        },
        b"x",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, name):
    (path,) = save_some(tmp_path, [1])
    forge(path, next(path.glob("*.safetensors")), HEADERS[name])
    with pytest.raises(CorruptCheckpoint):
        open_checkpoint(path, Ranks())


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
FILES = ["state.json", "*model-00001*", "*model-00002*", ".metadata"]  # the last: what torch's own format unpickles


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_that_was_crafted_runs_code(tmp_path, monkeypatch, file, payload):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # whoever sets this trusts what he loads himself
    monkeypatch.setenv("HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE", "*")
    _, newest = save_some(tmp_path, [1, 2])
    forge(newest, next(newest.glob(file), newest / file), PAYLOADS[payload](Hostile(tmp_path / "canary")))
    store = CheckpointManager(tmp_path / "checkpoints", Ranks(), required_state=("progress",))
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
        better = store.is_best(figures)
        assert better == (step in (1, 2))
        store.save(step, some_tensors(step), {}, metrics=figures)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]  # of equals the newest
    again = checkpoints(tmp_path, keep=2, best="accuracy")
    again.newest()
    assert not again.is_best({"accuracy": 0.9})
    assert again.is_best({"accuracy": 0.91})


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
    again = checkpoints(tmp_path, keep=1, best=best)
    again.newest()
    assert not again.is_best({figure: 1.0, f"{prefix}loss": 0.1})
    assert again.is_best({figure: 1.0, f"{prefix}loss": 0.09})


def test_smaller_is_better_with_a_minus(tmp_path):
    store = checkpoints(tmp_path, keep=1, best="-loss")
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        store.save(step, some_tensors(), {}, metrics={"loss": loss})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_torn_folders_do_not_push_out_what_is_valid(tmp_path):
    store = checkpoints(tmp_path, keep=2)
    store.save(1, some_tensors(1), {})
    for step in (7, 8, 9):
        shutil.copytree(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / f"step-0000000{step}")
        lose_manifest(tmp_path / "checkpoints" / f"step-0000000{step}")
    store.save(2, some_tensors(2), {})
    assert [one.step for one in list_complete(tmp_path / "checkpoints")] == [2, 1]


def test_a_corrupt_newer_one_does_not_push_out_what_was_just_saved(tmp_path):
    _, bad = save_some(tmp_path, [1, 9])
    file = next(bad.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store = checkpoints(tmp_path, keep=1)
    assert store.newest().step == 1
    store.save(2, some_tensors(2), {})
    assert checkpoints(tmp_path).newest().step == 2
    store.save(9, some_tensors(9), {})
    assert checkpoints(tmp_path).newest().step == 9
    store.save(10, some_tensors(10), {})
    assert names(tmp_path) == ["step-00000010"]  # written anew it counts, and goes as others do


def test_a_corrupt_newer_one_takes_no_place_of_those_that_stay(tmp_path):
    _, bad = save_some(tmp_path, [1, 9])
    shutil.copyfile(file := next(bad.glob("*.safetensors")), kept := tmp_path / "kept")
    file.write_bytes(kept.read_bytes()[:-1] + b"?")
    store = checkpoints(tmp_path, keep=2)
    assert store.newest().step == 1
    store.save(2, some_tensors(2), {})
    assert {"step-00000001", "step-00000002"} < set(names(tmp_path))


def test_what_was_just_saved_stays_beside_newer_ones_of_another_start(tmp_path):
    save_some(tmp_path, [8, 9])
    checkpoints(tmp_path, keep=1).save(2, some_tensors(2), {})
    assert names(tmp_path) == ["step-00000002", "step-00000009"]


def test_the_same_step_again_takes_the_place_of_the_old_one(tmp_path):
    store = checkpoints(tmp_path)
    store.save(1, some_tensors(1), {"which": "old"})
    store.save(1, some_tensors(1), {"which": "new"})
    assert names(tmp_path) == ["step-00000001"]
    assert store.newest().state == {"which": "new"}


def test_leftovers_of_dead_attempts_are_removed_and_a_displaced_one_returns(tmp_path):
    (path,) = save_some(tmp_path, [1])
    (path.parent / ".tmp-step-2-abc").mkdir()
    (path.parent / ".trash-step-00000000.abc").mkdir()
    os.rename(path, path.parent / ".replaced-step-00000001.abc")
    assert checkpoints(tmp_path).newest().step == 1
    assert names(tmp_path) == ["step-00000001"]


# -------------------------------------------------------------------------------------------------- when writing fails


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    save_some(tmp_path, [1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(usage)(10**9, 10**9 - 5000, 5000))
    with pytest.raises(
        FailedSave, match=r"step 2 .*checkpoints: .*No space left.* needs about 1,\d+,\d+ bytes, 5,000 are free"
    ):
        save_some(tmp_path, [2])
    assert names(tmp_path) == ["step-00000001"]


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from trainer.records.checkpoint.manager import CheckpointManager, FailedSave
from trainer.parallel.ranks import Ranks
store = CheckpointManager(Path(sys.argv[1]), Ranks())
store.save(1, {"weight": torch.ones(1000)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(2, {"weight": torch.ones(100_000)}, {})
except FailedSave as error:
    print(error)
print(store.newest().step, sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


def python(code, *arguments, before=(), input=False):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*before, sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE if input else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_write_that_fails_leaves_the_older_ones_and_no_draft(tmp_path):
    process = python(LIMITED, tmp_path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert "the checkpoint of step 2 could not be written to" in output
    assert "File too large" in output
    assert output.splitlines()[-1] == "1 ['step-00000001']"


SAVING = """
import os, sys, torch
from datetime import timedelta
from pathlib import Path
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.writer import AsyncSaver, SyncSaver
from trainer.parallel.ranks import Ranks

def save_for_ever():
    saver = AsyncSaver(Ranks(), timedelta(seconds=60)) if sys.argv[2] == "beside" else SyncSaver(Ranks())
    store = CheckpointManager(Path(sys.argv[1]), Ranks(), keep=2, saver=saver)
    found = store.newest()
    step = found.step if found else 0
    print(os.getpid(), step, flush=True)
    while True:
        step += 1
        store.save(step, {"weight": torch.full((200_000,), float(step))}, {"step": step})
        print(step - (sys.argv[2] == "beside"), flush=True)  # what is under way has no name yet

for _ in sys.stdin:  # a child for each line, so that the imports are paid for once
    child = os.fork()
    if not child:
        save_for_ever()
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.parametrize("saver", quickly(["at once", "beside"], "beside"))
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path, saver):
    dice, reached = random.Random(0), 0
    parent = python(SAVING, tmp_path, saver, input=True)
    for round_ in range(6):
        print(file=parent.stdin, flush=True)
        child, start = map(int, parent.stdout.readline().split())
        assert start >= reached
        lines = [parent.stdout.readline() for _ in range(1 + round_ % 3)]
        for _ in range(dice.randrange(100_000)):  # a moment of no particular length within the save that now runs
            pass
        os.kill(child, signal.SIGKILL)
        reached = int(lines[-1])
        while parent.stdout.readline() != "gone\n":
            pass
        store = CheckpointManager(tmp_path, Ranks(), keep=2)
        into = {"weight": torch.zeros(200_000)}
        found = store.newest()
        if found is None:  # the first one was still under way
            assert reached == 0
            continue
        store.read(found, into)
        assert found.step >= reached
        assert found.state == {"step": found.step}
        assert (into["weight"] == found.step).all()
    parent.communicate(timeout=30)


SAVING_BY_TWO = """
import os, sys, torch
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from trainer.parallel.ranks import Group
from trainer.records.checkpoint import tensor_files  # what a save imports, once for all children
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.writer import AsyncSaver

def save_for_ever(rank, meeting):
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    ranks, mesh = Group(dist.group.WORLD), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    store = CheckpointManager(Path(sys.argv[1]), ranks, keep=2, saver=AsyncSaver(ranks, timedelta(seconds=60)))
    found = store.newest()
    step = found.step if found else 0
    os.write(1, f"{rank} {os.getpid()} {step}\\n".encode())  # in one call, as both speak at once
    ranks.barrier()
    while True:
        step += 1
        shard = DTensor.from_local(torch.full((500_000,), float(step)), mesh, [Shard(0)])
        store.save(step, {"weight": shard, "optimizer/weight/m": shard}, {"step": step})
        if rank == 0:
            os.write(1, f"{step - 1}\\n".encode())  # what is under way has no name yet

for line in sys.stdin:  # children for each line, so that the imports are paid for once
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            try:
                save_for_ever(rank, line.strip())
            except BaseException:  # the other one was killed
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_kill_while_two_ranks_save_beside_their_steps_leaves_one_step_whole(tmp_path):
    dice, reached, folder = random.Random(1), 0, tmp_path / "checkpoints"
    parent = python(SAVING_BY_TWO, folder, input=True)
    for round_ in range(40):
        print(tmp_path / f"meeting-{round_}", file=parent.stdin, flush=True)
        begun = sorted(tuple(map(int, parent.stdout.readline().split())) for _ in range(2))
        assert [start >= reached for _, _, start in begun] == [True, True]
        lines = [parent.stdout.readline() for _ in range(1 + round_ % 3)]
        for _ in range(dice.randrange(1_000_000)):  # a moment of no particular length within the save that now runs
            pass
        for rank in ((0,), (1,), (0, 1), (1, 0))[round_ % 4]:
            os.kill(begun[rank][1], signal.SIGKILL)
        while (line := parent.stdout.readline()) != "gone\n":
            lines.append(line)
        reached = int(lines[-1])
        store = CheckpointManager(folder, Ranks(), keep=2)
        found = store.newest()
        assert (found is None) == (reached == 0)
        if found is not None:
            into = {name: torch.zeros(1_000_000) for name in ("weight", "optimizer/weight/m")}
            store.read(found, into)
            assert found.step >= reached
            assert all((tensor == found.step).all() for tensor in into.values())
            reached = found.step
    parent.communicate(timeout=30)


TRACED = """
import sys, torch
from pathlib import Path
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.parallel.ranks import Ranks
store = CheckpointManager(Path(sys.argv[1]), Ranks())
store.save(1, {"weight": torch.ones(9), "optimizer/weight/m": torch.ones(9)}, {})
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_everything_is_on_the_disk_before_the_name_is(tmp_path):
    trace = ["strace", "-f", "-y", "-qq", "-e", "trace=fsync,rename,renameat,renameat2", "-o", str(tmp_path / "trace")]
    process = python(TRACED, tmp_path / "checkpoints", before=trace)
    output = process.communicate(timeout=120)[0]
    if "ptrace" in output or "Operation not permitted" in output:
        pytest.skip("strace may not trace here")
    assert process.returncode == 0, output
    calls = [
        line for line in (tmp_path / "trace").read_text().splitlines() if "step-" in line or "checkpoints>" in line
    ]
    synced = [re.search(r"fsync\(\d+<([^>]*)>", line) for line in calls]
    renamed = next(index for index, line in enumerate(calls) if "rename" in line and '/step-00000001"' in line)
    before = [found.group(1).rsplit("/", 1)[-1] for found in synced[:renamed] if found]
    tensors = [index for index, name in enumerate(before) if name.endswith(".safetensors")]
    assert len({before[index] for index in tensors}) == 2
    assert max(*tensors, before.index("state.json")) < before.index("manifest.json") < len(before) - 1
    assert before[-1].startswith(".tmp-step-1")
    assert any(found and found.group(1).endswith("/checkpoints") for found in synced[renamed:])


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


def in_group(launch, folder, part):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, about torch
        join, wait = f"file://{folder}/join", timedelta(seconds=30)
        dist.init_process_group("gloo", join, timeout=wait, rank=launch.rank, world_size=launch.world_size)
        part(folder, Group(dist.group.WORLD))
        dist.barrier()


def fail_to_write(*_, **__):
    raise OSError(5, "Input/output error", "disk of rank 1")


class Copies(TorchDispatchMode):
    """Counts the pictures and filters that are copied."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.clone.default and args[0].dim() == 4
        return func(*args, **(kwargs or {}))


def headers_read(ranks, action):
    """The names of the files whose headers the ranks look into meanwhile, each as often as that happens."""
    names, read_header = [], tensor_files._read_header

    def counting(path, *words, **more):
        names.append(Path(path).name)
        return safe_open(path, *words, **more)

    def counting_header(path):
        names.append(path.name)
        return read_header(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.safe_open", counting)  # torch's reader
        patch.setattr("trainer.records.checkpoint.tensor_files._read_header", counting_header)
        action()
    return sorted(name for each in ranks.all_gather_values(names) for name in each)


def exchange(folder, ranks):
    """Read what one process wrote, write sharded and replicated, fail together, fall back together."""
    whole = whole_tensors()
    one = CheckpointManager(folder / "one", ranks)
    split = split_tensors(zeros_like(whole))
    one.read(one.newest(), split)
    assert equal(split, whole)

    two = CheckpointManager(folder / "two", ranks, facts={"strategy": "tp"})
    for step in (1, 2):
        two.save(step, split, {"step": step}, {"loss": 1.0})
    assert len(list((folder / "two" / "step-00000002").glob("shard-00002-*"))) >= 1  # both ranks wrote
    assert two.newest().facts == {"world_size": 2, "strategy": "tp"}
    again = split_tensors(zeros_like(whole))
    files = sorted(path.name for path in (folder / "two" / "step-00000002").glob("*.safetensors"))
    assert headers_read(ranks, two.newest) == files  # one rank each, which tells all
    two.read(two.newest(), again)
    assert equal(again, whole)
    ranks.barrier()
    if ranks.is_main:
        shorten(folder / "two" / "step-00000002")
    ranks.barrier()
    assert CheckpointManager(folder / "two", ranks).newest().step == 1

    for place in (
        "trainer.records.checkpoint.tensor_files.save_file",
        "trainer.records.checkpoint.writer._sync_and_hash",
    ):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1:  # an error that only one rank has
                patch.setattr(place, fail_to_write)
            with pytest.raises(FailedSave, match=r"disk of rank 1.*are intact"):
                two.save(3, split, {})
        ranks.barrier()
        assert not (folder / "two" / "step-00000003").exists()
        assert not list((folder / "two").glob(".tmp-*"))
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:  # before anybody writes
            patch.setattr("trainer.records.checkpoint.save_plan._hash_of", fail_to_write)
        with pytest.raises(FailedSave, match="disk of rank 1"):
            CheckpointManager(folder / "none", ranks).save(1, split, {})

    three = CheckpointManager(folder / "three", ranks)
    three.save(1, whole, {})  # nothing sharded: the main rank writes alone
    assert not list((folder / "three").glob("*/shard-00002-*"))
    into = zeros_like(whole)
    three.read(three.newest(), into)
    assert equal(into, whole)

    turned = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    four = CheckpointManager(folder / "four", ranks)
    with Copies() as copies:
        four.save(1, {"conv": turned, "optimizer/conv/exp_avg": turned + 1}, {})
    assert copies.count == (2 if ranks.is_main else 0)  # who writes nothing copies nothing
    with Copies() as copies:
        four.save(2, {"conv": turned, f"optimizer/{ranks.rank}/exp_avg": turned + 1}, {})  # a moment of one's own
    assert sum(ranks.all_gather_values(copies.count)) == 3  # the weight is written, and copied, by one of them


def test_one_process_and_two_read_what_the_other_wrote(processes, tmp_path):
    whole = whole_tensors()
    CheckpointManager(tmp_path / "one", Ranks()).save(1, whole, {})
    processes.run(2, in_group, tmp_path, exchange)
    for folder in ("two", "three"):
        store, into = CheckpointManager(tmp_path / folder, Ranks()), zeros_like(whole)
        shutil.rmtree(tmp_path / "two" / "step-00000002", ignore_errors=True)
        found = store.newest()
        store.read(found, into)
        assert equal(into, whole)
        assert found.tensors.keys() == whole.keys()
        assert found.tensors["one_row"].shape == (1, 4)
