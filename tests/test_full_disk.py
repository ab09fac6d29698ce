"""A disk that is full for a while, or to the end: the run goes on, no figure is lost, and status.json is true."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from recipes.vision.classification import Classification
from tests.run import SMALL, run

WORDS = (
    *(*SMALL, "schedule=constant", "loop.global_batch=120", "loop.steps=30", "loop.eval_every=15", "run.dir=run"),
    *("log=[console,tensorboard]", "trust=[tests]", "task._target_=tests.test_full_disk.Filling"),
)


class Filling(Classification):
    """After one step something fills the disk to the last byte, after another it goes."""

    def __init__(self, full: int, free: int | None = None, **words: Any) -> None:
        super().__init__(**words)
        self.full, self.free = full, free

    def after_step(self, network: nn.Module, step: int) -> None:
        ballast = Path("ballast")
        if step == self.full and not Path("filled").exists():
            Path("filled").touch()
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    assert shutil.disk_usage(".").free == 0
        if step == self.free:
            ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    (path := tmp_path / "disk").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs to mount a file system, as root may")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's reader
def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while_and_no_figure_is_lost(disk: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = run([*WORDS, "+task.full=3", "+task.free=20"], place=disk)
    assert len(finished.curve()) == 30
    assert [line["step"] for line in finished.lines("eval")] == [15, 30]
    assert (finished.status["state"], finished.status["step"]) == ("completed", 30)
    for name in ("MetricsFile", "TensorBoard"):
        assert finished.out.count(f"{name} cannot write, ") == finished.out.count(f"{name} writes again; ") == 1
    assert "metrics.jsonl: No space left on device; waiting for room: 1 line" in finished.out
    assert "MetricsFile writes again; nothing was lost" in finished.out
    events = EventAccumulator(str(finished.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [one.value for one in events.Scalars("loss/loss")] == pytest.approx(finished.curve())


def test_a_run_whose_disk_stays_full_ends_with_the_truth(disk: Path) -> None:
    failed = run([*WORDS, "+task.full=3"], place=disk, code=1)
    assert "No space left on device" in failed.out
    said = failed.status
    assert (said["state"], said["attempt"]) == ("failed", 1)
    assert "could not be written to " in said["reason"] or "No space" in said["reason"]
    (disk / "ballast").unlink()  # there is room again: the same command
    assert len(run([*WORDS, "+task.full=3"], place=disk).curve()) == 30
