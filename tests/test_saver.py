"""A checkpoint that is written beside the next steps is the one that would have been written at once."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks import Processes
from tests.run import SMALL, TRANSFORMER, quickly, run
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.writer import AsyncSaver, Disk, FailedSave, SyncSaver

MINUTE = timedelta(seconds=60)


class Held(Disk):
    """It takes tensors only once it is let go, and may be full then."""

    def __init__(self, full: bool = False) -> None:
        self.go, self.full = threading.Event(), full

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
        assert self.go.wait(60)
        if self.full:
            raise OSError(28, "No space left on device")
        super().write_tensors(path, tensors, metadata)


def held(folder: Path, disk: Disk) -> CheckpointManager:
    return CheckpointManager(folder, Ranks(), saver=AsyncSaver(Ranks(), MINUTE), disk=disk)


def test_what_the_next_steps_change_is_not_what_is_written(tmp_path: Path) -> None:
    weight, moment = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.tensor(1.0)
    store = held(tmp_path, disk := Held())
    for step in (1, 2):  # the memory of the first copy is used again
        weight.fill_(step), moment.fill_(step)
        state = {"step": [step]}
        disk.go.clear()
        assert store.save(step, {"weight": weight, "optimizer/weight/step": moment}, state) == (0, ())
        assert not list(tmp_path.glob("step-0000000" + str(step)))
        weight.zero_(), moment.zero_()
        state["step"].clear()
        disk.go.set()
        store.finish()
        (files,) = [sorted((tmp_path / f"step-0000000{step}").glob("*.safetensors"))]
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert (written["weight"].eq(step).all(), written["optimizer/weight/step"]) == (True, step)
        assert store.newest().state == {"step": [step]}


def test_what_goes_wrong_is_heard_afterwards_and_has_beaten_nobody(tmp_path: Path) -> None:
    store = held(tmp_path, disk := Held(full=True))
    assert store.save(1, {"weight": torch.ones(3)}, {}, {"loss": 1.0}) == (0, ())
    assert not store.failed()
    assert not store.is_best({"loss": 2.0})  # what is under way counts
    disk.go.set()
    with pytest.raises(FailedSave, match=r"step 1 .*No space left on device"):
        store.finish_save()
    assert store.is_best({"loss": 2.0})
    # what is not finite is found in the copy, and is not written
    disk.full, broken = False, {"weight": torch.tensor([1.0, torch.nan]), "mask": torch.tensor(torch.inf)}
    assert store.save(2, broken, {}, None, ["weight"]) == (0, ())
    assert store.finish_save() == (2, ["weight on rank 0"])
    assert list(tmp_path.iterdir()) == []
    store.save(3, {"weight": torch.ones(3)}, {})
    store.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_without_room_for_a_copy_the_loop_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, weight, written = AsyncSaver(Ranks(), MINUTE), torch.ones(1000), []
    monkeypatch.setattr("trainer.records.checkpoint.writer.available_host_memory", lambda: 4000.0)
    local = saver.snapshot({"weight": weight})["weight"]
    assert local.data_ptr() == weight.data_ptr()
    saver.start(lambda: written.append(local.sum().item()))
    assert written == [1000]  # before the step after it changes it
    saver.wait()


def test_the_thread_that_saves_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with device 0 as the current one, which is another rank's."""
    chosen: list[tuple[str, torch.device]] = []
    at = threading.current_thread
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: chosen.append((at().name, device)))
    saver = AsyncSaver(Ranks(), MINUTE)
    saver._device = torch.device("cuda", 3)  # as `snapshot` leaves it behind tensors of a GPU
    saver.start(lambda: None)
    saver.wait()
    assert chosen == [("saving", torch.device("cuda", 3))]


# ---------------------------------------------------------------------------------------------------------- whole runs

# A rate of 1: weights of another step are far away.
WORDS = (
    *("optimizer=sgd", "optimizer.lr=1", "schedule=constant", "loop.steps=6", "loop.global_batch=120"),
    *("loop.save_every=2", "loop.eval_every=null", "checkpoint.keep=9", "ema.decay=0.5", "loop.micro_batches=2"),
)


def tensors(folder: Path) -> dict[str, Any]:
    """All that the checkpoints of a run hold, as bytes."""
    found: dict[str, bytes] = {}
    for path in sorted((folder / "checkpoints").iterdir()):
        for file in sorted(path.glob("*.safetensors")):
            found |= {f"{path.name}/{file.name}/{name}": x.numpy().tobytes() for name, x in load_file(file).items()}
    return found


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tp", "pp"])
def test_a_run_that_saves_beside_its_steps_has_the_bits_of_one_that_waits(
    processes: Processes, tmp_path: Path, strategy: str
) -> None:
    words = [*WORDS, *(TRANSFORMER if strategy == "tp" else SMALL), f"strategy={strategy}"]
    for way, name in (("true", "beside"), ("false", "once")):
        run([*words, f"checkpoint.asynchronous={way}", f"run.dir={name}"], ranks=2, how="group", place=tmp_path)
    assert tensors(tmp_path / "beside") == tensors(tmp_path / "once")
    assert len({key.split("/")[0] for key in tensors(tmp_path / "beside")}) == 3


# -------------------------------------------------------------------------------------------------------------- killed


def save_for_ever(folder: Path, way: str, pipe: int) -> None:
    """Says the step that it goes on from; then each step that has its name."""
    store = CheckpointManager(
        folder, Ranks(), keep=2, saver=AsyncSaver(Ranks(), MINUTE) if way == "beside" else SyncSaver(Ranks())
    )
    found = store.newest()
    step = found.step if found else 0
    os.write(pipe, f"{step}\n".encode())
    while True:
        step += 1
        weight = torch.full((200_000,), float(step))
        store.save(step, {"weight": weight, "optimizer/weight/m": weight}, {"step": step})
        os.write(pipe, f"{step - (way == 'beside')}\n".encode())  # what is under way has no name yet


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", quickly(["at once", "beside"], "beside"))
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path, way: str) -> None:
    """Of two ranks that are killed as they save, tests/test_chaos.py shows the same."""
    dice, reached, folder = random.Random(1), 0, tmp_path / "checkpoints"
    for round_ in range(8):
        reader, pipe = os.pipe()
        if not (child := os.fork()):
            try:
                save_for_ever(folder, way, pipe)
            finally:
                os._exit(1)
        os.close(pipe)
        with os.fdopen(reader) as said:
            assert int(said.readline()) >= reached
            lines = [said.readline() for _ in range(1 + round_ % 3)]
            for _ in range(dice.randrange(100_000)):  # a moment of no particular length within the save that runs
                pass
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reached = int([*lines, *said][-1])
        store = CheckpointManager(folder, Ranks(), keep=2)
        found = store.newest()
        assert found is not None or reached == 0  # none: the first one was still under way
        if found is not None:
            into = {name: torch.zeros(200_000) for name in ("weight", "optimizer/weight/m")}
            store.read(found, into)
            assert found.step >= reached
            assert found.state == {"step": found.step}
            assert all((tensor == found.step).all() for tensor in into.values())
            reached = found.step
