"""A save that fails costs that save and nothing else; what cannot be made up for ends the run, and it says so."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import SMALL, curve, finish, single, status
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from trainer.launch.rendezvous import Launch
from trainer.records.checkpoint import manager, tensor_files
from trainer.records.checkpoint.manager import FailedSave
from trainer.records.checkpoint.manifest import read_manifest

WORDS = (
    *SMALL,
    "model.width=128",  # files of 32 KiB and more: those of the log stay below the limit
    "loop.global_batch=120",
    "loop.steps=10",
    "loop.eval_every=null",
    "loop.save_every=2",
    "checkpoint.keep=9",
)
ALL = [2, 4, 6, 8, 10]


@contextmanager
def full(*saves: int) -> Iterator[None]:
    """In these saves of this process, counted from 1, no file can grow beyond 20 kB: EFBIG, for root as well."""
    write, calls = tensor_files.write_tensors, []

    def writing(*args: Any, **words: Any) -> None:
        calls.append(args)
        _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most) if len(calls) in saves else before)
        try:
            write(*args, **words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "write_tensors", writing)
        yield


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints of a run; nothing else lies among them."""
    return [read_manifest(path).step for path in sorted((folder / "checkpoints").iterdir())]


def last(folder: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint, as bytes."""
    files = sorted((folder / "checkpoints" / "step-00000010").glob("*.safetensors"))
    return {name: x.numpy().tobytes() for file in files for name, x in load_file(file).items()}


def same(folder: Path, whole: Path) -> None:
    """A run that cannot be told from the one that nothing happened to."""
    assert (status(folder)["state"], status(folder)["step"]) == ("completed", 10)
    assert curve(folder, "loss_hex") == curve(whole, "loss_hex")
    assert last(folder) == last(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    assert here(*WORDS, f"run.dir={folder}") == 0
    return folder


def test_a_save_that_fails_costs_that_save_alone(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full(2, 4), caplog.at_level(logging.WARNING, manager.__name__):
        assert here(*WORDS, f"run.dir={tmp_path}") == 0
    assert saved(tmp_path) == [2, 6, 10]
    same(tmp_path, whole)
    said = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert [message.split("step ")[1][0] for message in said] == ["4", "8"]
    for words in (str(tmp_path / "checkpoints"), "File too large", "needs about 1,", "bytes, ", "1 of at most 2"):
        assert words in said[1]


CASES = {  # the saves that fail, what is asked for besides, the checkpoints then, what is said
    "three in a row": ((2, 3, 4), (), [2], r"step 8 .*It is failed save number 3 in a row"),
    "at once": ((2,), ("checkpoint.on_error=stop",), [2], r"step 4 .*are intact$"),
    "the last": ((5,), (), ALL[:-1], r"step 10 .*No save follows"),
}


@pytest.mark.parametrize("case", quickly(CASES, "the last"))
def test_what_cannot_be_made_up_for_ends_the_run(whole: Path, tmp_path: Path, case: str) -> None:
    saves, words, left, message = CASES[case]
    with full(*saves), pytest.raises(FailedSave, match=message):
        here(*WORDS, *words, f"run.dir={tmp_path}")
    assert saved(tmp_path) == left
    # there is space again: the same command
    assert here(*WORDS, *words, f"run.dir={tmp_path}") == 0
    same(tmp_path, whole)


FILLED = """
import resource

from recipes.vision.classification import Classification


class Filled(Classification):
    def after_step(self, network, step):  # in the first step the disk becomes full
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


def test_a_run_that_was_to_stop_and_cannot_save_has_failed(tmp_path: Path) -> None:
    """What a user sees of it: exit code, screen, status.json."""
    (tmp_path / "disk" / "conf" / "task").mkdir(parents=True)
    (tmp_path / "disk" / "lab.py").write_text(FILLED)
    (tmp_path / "disk" / "conf" / "task" / "filled.yaml").write_text("_target_: disk.lab.Filled\n")
    words = ("--config-dir", "disk/conf", *WORDS, "task=filled", "loop.save_every=null", "run.name=run")
    screen = finish(single(*words, "run.stop_after=0.001", "log=[]"), tmp_path, code=1)
    said = "the checkpoint of step 1 could not be written to "
    assert said in screen.splitlines()[-1], screen
    assert "No save follows" in screen.splitlines()[-1], screen
    assert "Traceback" not in screen
    ended = status(tmp_path / "runs" / "run")
    assert ended["state"] == "failed"
    assert said in ended["reason"]
    assert saved(tmp_path / "runs" / "run") == []


def one_disk_is_full(launch: Launch, place: Path) -> int:
    """The exit code, where the disk of rank 1 is full in the second save."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with full(*([2] if launch.rank == 1 else [])):
            return product(launch, place, [*WORDS, "strategy=fsdp", "run.dir=run"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_where_one_rank_cannot_write_all_go_on(processes: Processes, whole: Path, tmp_path: Path) -> None:
    assert processes.run(2, one_disk_is_full, tmp_path) == [0, 0]
    assert saved(tmp_path / "run") == [2, 6, 8, 10]
    assert curve(tmp_path / "run") == pytest.approx(curve(whole), abs=1e-5)
