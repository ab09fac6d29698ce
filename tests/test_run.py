"""One run as a whole: how far it is from the command line to a step, and that its folder tells the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import SMALL, finish, single, status
from tests.inside import here
from trainer.refusal import Refusal

WORDS = (*SMALL, "strategy=single", "schedule=constant", "loop.global_batch=120", "loop.steps=1")

LAB = """
import traceback
import torch

class Traced(torch.optim.SGD):
    def step(self, closure=None):
        names = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
        start = names.index(next(name for name in names if name[1] == "main"))
        own = [name for file, name in names[start:] if "torch/optim/optimizer.py" not in file]  # its profiler's wrapper
        open("calls", "w").write(" ".join(own))
        return super().step(closure)
"""


def test_from_the_command_line_to_a_step_there_are_six_calls(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(LAB)
    words = (*WORDS, "device=cpu", "log=[]", "trust=[lab]", "optimizer._target_=lab.Traced", "run.dir=run")
    finish(single(*words, "optimizer=sgd"), tmp_path)
    assert (tmp_path / "calls").read_text() == "main fit fit train_step optimizer_step step"


def test_a_start_that_is_refused_late_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"checkpoint\.best=makro: the task's figures are"):
        here(*WORDS, f"run.root={tmp_path / 'runs'}", "checkpoint.best=makro")
    assert list((tmp_path / "runs").iterdir()) == []


def test_in_a_folder_that_was_there_it_does_not_stay_running(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"checkpoint\.best=makro: the task's figures are"):
        here(*WORDS, f"run.dir={tmp_path}", "checkpoint.best=makro")
    said = status(tmp_path)
    assert said["state"] == "failed"
    assert said["reason"].startswith("checkpoint.best=makro")
