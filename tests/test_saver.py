"""A checkpoint that is written beside the next steps is the one that would have been written at once."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import SMALL, TRANSFORMER, curve, status
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from trainer.launch.devices import available_host_memory
from trainer.launch.rendezvous import Launch
from trainer.parallel.ranks import Group, Ranks
from trainer.records.checkpoint import tensor_files, writer
from trainer.records.checkpoint.manager import CheckpointManager, FailedSave
from trainer.records.checkpoint.manifest import read_manifest
from trainer.records.checkpoint.store import inspect_checkpoint
from trainer.records.checkpoint.writer import AsyncSaver
from trainer.strategies.parallel_model import ParallelModel

# A rate of 1: weights of another step are far away.
WORDS = (
    "optimizer=sgd",
    "optimizer.lr=1",
    "schedule=constant",
    "loop.steps=6",
    "loop.global_batch=120",
    "loop.log_every=1",
)
SAVES = ("loop.save_every=2", "loop.eval_every=null", "checkpoint.keep=9", "ema.decay=0.5")
MLP = SMALL[:3]


@contextmanager
def late(last: int) -> Iterator[list[int]]:
    """Files are written only when the next step has changed the weights; yields the steps that were written."""
    after_step, write, written = ParallelModel.after_step, tensor_files.write_tensors, []
    done, moved = [0], threading.Condition()

    def stepped(self: ParallelModel, step: int) -> None:
        after_step(self, step)
        with moved:
            done[0] = step
            moved.notify_all()

    def writing_late(folder: Path, *args: Any) -> None:
        step = int(folder.name.split("-")[2])
        with moved:
            assert moved.wait_for(lambda: done[0] > min(step, last - 1), timeout=60), f"training waits at step {step}"
        written.append(step)
        write(folder, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "after_step", stepped)
        patch.setattr(tensor_files, "write_tensors", writing_late)
        yield written


def tensors(folder: Path) -> dict[str, Any]:
    """All that the checkpoints of a run hold, as bytes."""
    found: dict[str, bytes] = {}
    for path in sorted((folder / "checkpoints").iterdir()):
        for file in sorted(path.glob("*.safetensors")):
            found |= {f"{path.name}/{file.name}/{name}": x.numpy().tobytes() for name, x in load_file(file).items()}
    return found


LATE = [2, 4, 6]


def saves_late(launch: Launch, place: Path, *words: str) -> tuple[int, list[int]]:
    """The exit code of a run that saves late, and what it wrote."""
    with late(6) as written:
        return product(launch, place, [*WORDS, *SAVES, *words, "run.dir=late"]), written


def test_the_bits_are_those_of_saving_at_once(tmp_path: Path) -> None:
    assert here(*WORDS, *SAVES, *MLP, "checkpoint.asynchronous=false", f"run.dir={tmp_path / 'once'}") == 0
    assert saves_late(Launch(), tmp_path, *MLP) == (0, LATE)
    assert tensors(tmp_path / "late") == tensors(tmp_path / "once")
    assert len({key.split("/")[0] for key in tensors(tmp_path / "late")}) == 3


@pytest.mark.long
@pytest.mark.parametrize("strategy", quickly(["ddp", "zero1", "fsdp", "tp", "pp"], "fsdp"))
def test_the_same_on_several_ranks(processes: Processes, tmp_path: Path, strategy: str) -> None:
    network = TRANSFORMER if strategy == "tp" else MLP
    words = [*network, f"strategy={strategy}", "loop.micro_batches=2"]
    once = [*WORDS, *SAVES, *words, "checkpoint.asynchronous=false", "run.dir=once"]
    assert processes.run(2, product, tmp_path, once) == [0, 0]
    # with ddp the main rank has all of it, and writes alone
    others = [] if strategy == "ddp" else LATE
    assert processes.run(2, saves_late, tmp_path, *words) == [(0, LATE), (0, others)]
    assert tensors(tmp_path / "late") == tensors(tmp_path / "once")


def test_a_save_under_way_survives_an_error_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*WORDS, *SAVES, *MLP, f"run.dir={tmp_path}")
    with late(6), monkeypatch.context() as patch:
        counted = ParallelModel.after_step

        def breaks(self: ParallelModel, step: int) -> None:
            counted(self, step)
            if step == 3:
                raise ZeroDivisionError

        patch.setattr(ParallelModel, "after_step", breaks)
        with pytest.raises(ZeroDivisionError):
            here(*words)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert here(*words) == 0
    assert (status(tmp_path)["resume_step"], len(curve(tmp_path))) == (2, 6)


def test_memory_is_kept_and_nothing_reaches_into_it(tmp_path: Path) -> None:
    saver, weight = (
        AsyncSaver(Ranks(), timedelta(seconds=60)),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    )
    copies = [saver.snapshot({"weight": weight.mul_(2), "step": torch.tensor(1.0)}) for _ in range(2)]
    weight.zero_()
    assert copies[0]["weight"].data_ptr() == copies[1]["weight"].data_ptr()
    assert copies[1]["weight"].eq(4).all()
    assert copies[1]["weight"].stride() == weight.stride()  # a copy that turns a tensor around takes far longer
    assert saver.snapshot({"step": torch.tensor(1.0)}).keys() == {"step"}


def test_what_goes_wrong_is_heard_afterwards_and_has_beaten_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, before = threading.Event(), writer._make_draft

    def full(*args: Any) -> None:
        assert go.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_make_draft", full)
    store = CheckpointManager(tmp_path, Ranks(), saver=AsyncSaver(Ranks(), timedelta(seconds=60)))
    assert store.save(1, {"weight": torch.ones(3)}, {}, {"loss": 1.0}) == (0, ())
    assert not store.failed()
    assert not store.is_best({"loss": 2.0})  # what is under way counts
    go.set()
    with pytest.raises(FailedSave, match=r"step 1 .*No space left on device"):
        store.finish_save()
    assert store.is_best({"loss": 2.0})
    # what is not finite is found in the copy, and is not written
    monkeypatch.setattr(writer, "_make_draft", before)
    assert store.save(
        2, {"weight": torch.tensor([1.0, torch.nan]), "mask": torch.tensor(torch.inf)}, {}, None, ["weight"]
    ) == (0, ())
    while not store.failed():
        pass
    assert store.finish_save() == (2, ["weight on rank 0"])
    assert list(tmp_path.iterdir()) == []
    store.save(3, {"weight": torch.ones(3)}, {})
    store.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


# ------------------------------------------------------------------------------------------- what ranks tell each other


def values_told(launch: Launch, place: Path, *words: str) -> list[int]:
    """The sizes of the values that this rank tells the others in a whole run, in bytes."""
    sizes: list[int] = []
    gather = Group.all_gather_values

    def counting(self: Group, value: Any) -> list[Any]:
        sizes.append(len(pickle.dumps(value)))
        return gather(self, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_gather_values", counting)
        assert (
            product(launch, place, [*WORDS, *SAVES, *words, "optimizer=adamw", "optimizer.lr=1e-3", "run.dir=told"])
            == 0
        )
    return sizes


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "size", "once"), [(("fsdp",), 2, 0), (("hsdp", "strategy.replicate=2"), 4, 0), (("zero1",), 2, 1)]
)
def test_a_save_tells_the_others_a_hash_of_how_its_tensors_are_spread(
    tmp_path: Path, processes: Processes, words: tuple[str, ...], size: int, once: int
) -> None:
    """Not their plans, which grow with tensors and with ranks. Where ranks hold other names they tell them once."""
    words = ("model=mlp", "model.width=32", "model.depth=40", f"strategy={words[0]}", *words[1:])
    for sizes in processes.run(size, values_told, tmp_path, *words):
        assert len([each for each in sizes if each > 4000]) == once, sizes
    # whatever was written by whom: all of it is there, each shard once
    assert here("job=evaluate", f"run.dir={tmp_path / 'told'}", "strategy=single") == 0
    for checkpoint in (tmp_path / "told" / "checkpoints").iterdir():
        inspect_checkpoint(read_manifest(checkpoint))


# --------------------------------------------------------------------------------------------------------- its thread


def test_the_thread_that_saves_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with device 0 as the current one, which is another rank's."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda device: chosen.append((threading.current_thread().name, device))
    )
    saver = AsyncSaver(Ranks(), timedelta(seconds=10))
    saver.start(lambda: None)
    saver.wait()
    assert chosen == []
    saver._device = torch.device("cuda", 3)  # as `copied` leaves it behind tensors of a GPU
    saver.start(lambda: None)
    saver.wait()
    assert chosen == [("saving", torch.device("cuda", 3))]


def test_without_room_for_a_copy_the_loop_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, weight, written = AsyncSaver(Ranks(), timedelta(seconds=10)), torch.ones(1000), []
    for spare, copied in ((1e9, True), (4000.0, True), (4000.0, False)):
        monkeypatch.setattr("trainer.records.checkpoint.writer.available_host_memory", partial(float, spare))
        if not copied:
            saver._buffers.clear()  # memory that it has already is no question
        held = saver.snapshot({"weight": weight})["weight"]
        assert (held is not weight) == copied
        saver.start(lambda held=held: written.append(held.sum().item()))  # type: ignore[misc]
        if not copied:  # what the step after it changes has been written by then
            assert written[-1] == 1000
        saver.wait()
    assert written == [1000.0] * 3
    assert 0 < available_host_memory() < float("inf")
