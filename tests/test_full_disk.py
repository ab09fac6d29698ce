"""A disk that is full for a while, or to the end: the run goes on, no figure is lost, and status.json is true."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, curve, lines, status
from tests.inside import here
from tests.test_log import eval_line, scalars, train_line
from trainer.launch.rank_output import append_to_log
from trainer.launch.run_status import StatusWriter, mark_failed
from trainer.loop.trainer import Trainer
from trainer.records.checkpoint.manager import FailedSave
from trainer.records.console import LogFile
from trainer.records.metrics_files import MetricsFile
from trainer.records.sinks import Log
from trainer.records.tensorboard import TensorBoard

WORDS = (*SMALL, "schedule=constant", "loop.global_batch=120", "loop.steps=12", "loop.eval_every=12")


class Disk:
    """A file system of a few megabytes, which can be filled to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                assert shutil.disk_usage(self.path).free == 0

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs to mount a file system, as root may")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_every_sink_goes_on_when_there_is_room_again(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    (disk.path / "logs").mkdir()
    log = Log([MetricsFile(), LogFile(), TensorBoard()])
    log.open(disk.path, 0, None, None)
    log.train(train_line(1))
    disk.fill()
    for step in range(2, 40):  # more than what is left of the pages that the files have
        log.train(train_line(step, loss_hex="x" * 500))
        log.say("x" * 500)
    log.eval(eval_line(39))
    log.flush()
    said = [record.getMessage() for record in caplog.records]
    assert sorted(" ".join(line.split()[1:4]) for line in said) == [
        f"{name} cannot write," for name in ("LogFile", "MetricsFile", "TensorBoard")
    ]
    assert "metrics.jsonl: No space left on device; waiting for room: 1 line" in "\n".join(said)
    assert (disk.path / "metrics.jsonl").read_bytes().endswith(b"}\n")  # whoever reads meanwhile sees no half line
    disk.empty()
    log.train(train_line(40))
    assert [line["step"] for line in lines(disk.path, "train")] == list(range(1, 41))
    said = [record.getMessage().split("note        ")[1] for record in caplog.records][3:]
    assert [line for line in said if "LogFile" not in line] == [
        f"{name} writes again; nothing was lost" for name in ("MetricsFile", "TensorBoard")
    ]
    assert re.search(r"LogFile writes again; \d+ calls meanwhile were lost", "\n".join(said))
    log.close()
    curves = scalars(disk.path / "tensorboard")[1]
    assert curves["loss/loss"] == [(step, pytest.approx(0.21344)) for step in range(1, 41)]
    assert [step for step, _ in scalars(disk.path / "tensorboard" / "eval")[1]["accuracy/accuracy"]] == [39]


def test_an_end_is_said_on_a_full_disk(disk: Disk) -> None:
    running = StatusWriter(disk.path, 0, 1, "single")
    running.write("running", 7, None)
    before = (disk.path / "status.json").read_bytes()
    disk.fill()
    StatusWriter(disk.path, 0, 1, "single").write("running", 9, None)  # which can wait
    assert (disk.path / "status.json").read_bytes() == before
    running.write("preempted", 9, "SIGTERM")
    assert (status(disk.path)["state"], status(disk.path)["step"]) == ("preempted", 9)
    mark_failed(disk.path, "OSError: " + "no space left " * 30, 0)
    assert (status(disk.path)["state"], status(disk.path)["reason"][:7]) == ("failed", "OSError")
    running.write("completed", 12, None)  # shorter than what stood there
    assert (status(disk.path)["state"], status(disk.path)["reason"]) == ("completed", None)
    with pytest.raises(OSError, match="No space left"):  # no room for so much; what stood there stays
        mark_failed(disk.path, "x" * 8000, 0)
    assert status(disk.path)["state"] == "completed"
    assert not append_to_log("a word", disk.path, 0)
    assert [path.name for path in disk.path.iterdir()].count("status.json") == 1


def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.train_step

    def filled(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == 3:
            disk.fill()
        if trainer.progress.step == 9:
            disk.empty()
        step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", filled)
    assert here(*WORDS, f"run.dir={disk.path}/run", "log=[tensorboard]") == 0
    assert len(curve(disk.path / "run")) == 12
    assert (status(disk.path / "run")["state"], status(disk.path / "run")["step"]) == ("completed", 12)


def test_a_run_whose_disk_stays_full_ends_with_the_truth(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.train_step

    def filled(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == 3:
            disk.fill()
        step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", filled)
    with pytest.raises(FailedSave):
        here(*WORDS, f"run.dir={disk.path}/run")
    # what an account of the failure says is the command line's
    mark_failed(disk.path / "run", "FailedSave", 0)
    assert status(disk.path / "run")["state"] == "failed"
    disk.empty()
    monkeypatch.undo()
    assert here(*WORDS, f"run.dir={disk.path}/run") == 0
    assert len(curve(disk.path / "run")) == 12
