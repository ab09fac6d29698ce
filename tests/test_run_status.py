"""status.json says where a run is and how it ended; goodput counts what was done again."""

from __future__ import annotations

from pathlib import Path

from tests.run import status
from trainer.launch.run_status import StatusWriter


def begun(folder: Path, resume_step: int = 0) -> StatusWriter:
    """An attempt that reports each time it is told something."""
    attempt = StatusWriter(folder, resume_step, 2, "ddp", interval=0.0)
    attempt.write("running", resume_step, None)
    return attempt


def test_steps_that_a_killed_attempt_had_saved_count_though_it_had_not_reported_them(tmp_path: Path) -> None:
    begun(tmp_path).write("running", 7, None)  # killed after step 14, with a checkpoint of step 10
    begun(tmp_path, 10).write("completed", 20, None)
    assert (status(tmp_path)["executed"], status(tmp_path)["goodput"]) == (20, 1.0)


def test_a_run_that_began_from_another_ones_checkpoint_counts_its_own_steps(tmp_path: Path) -> None:
    begun(tmp_path, 500).write("running", 510, None)
    assert status(tmp_path)["goodput"] == 1.0
    begun(tmp_path, 500).write("completed", 520, None)
    assert status(tmp_path)["goodput"] == round(20 / 30, 4)
