"""One run as a whole: how far it is from the command line to a step, and that its folder tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import SMALL, finish, single, status
from tests.inside import here
from trainer.api import build_run
from trainer.launch.rendezvous import Launch
from trainer.learning.intervals import Cadences, Interval
from trainer.messages import Refusal

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
    assert (tmp_path / "calls").read_text() == "main __call__ fit train_step optimizer_step step"


def test_one_process_does_not_import_the_compiler(tmp_path: Path) -> None:
    words = (
        *WORDS,
        "strategy=auto",
        "device=cpu",
        "ema.decay=0.9",
        "loop.max_norm=1",
        "run.dir=run",
    )  # auto: the default
    python, *rest = single(*words)
    imported = set(
        re.findall(r"^import time:.*\| +(\S+)$", finish([python, "-X", "importtime", *rest], tmp_path), re.M)
    )
    assert "torch.optim.adamw" in imported
    assert not {"torch._dynamo", "torch._inductor"} & imported


def test_a_run_says_what_it_found_that_it_is_alone_and_where_its_best_checkpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, "strategy=ddp", "loop.steps=2", "loop.eval_every=1", "log=[console]", f"run.root={tmp_path}")
    assert here(*words) == 0
    said = capsys.readouterr().out
    assert (
        "data        1,437 samples in 10 classes\nevaluation  360 samples; the best has the largest accuracy\n" in said
    )
    assert "note        the run ends before schedule.warmup: no step" in said  # 2 of 20 steps
    assert "note        ddp has only one process; to use two: processes=2" in said
    (found,) = re.findall(r"^best        accuracy 0\.\d{4} at step [12]: (.+)$", said, re.MULTILINE)
    assert (Path(found) / "manifest.json").is_file()


LIGHTNING = """
from torch import nn

class Light(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def configure_optimizers(self):
        raise AssertionError

    def training_step(self, batch, index):
        raise AssertionError
"""


def test_methods_that_lightning_would_call_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "light.py").write_text(LIGHTNING)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "light.yaml").write_text("_target_: light.Light")
    words = ("--config-dir", f"{tmp_path}/conf", "model=light", "loop.steps=1", "strategy=single", "log=[console]")
    assert here(*words, f"run.root={tmp_path}") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note Light.configure_optimizers is not called: the optimizer is chosen with optimizer=" in said
    assert "note Light.training_step is not called: the task says the loss, task=" in said


@pytest.mark.parametrize(("strategy", "name"), [("auto", "single"), ("mesh", "fsdp")])
def test_a_name_says_what_a_strategy_came_to(tmp_path: Path, strategy: str, name: str) -> None:
    words = [*SMALL, f"strategy={strategy}", f"run.root={tmp_path}"]
    build_run(words, Launch()).open_folder(lambda _: None)
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith(f"_mlp_{name}")


def test_a_strategy_knows_before_anything_starts_how_often_the_run_does_what() -> None:
    words = [*SMALL, "loop.log_every=7", "loop.eval_every=2ep", "loop.save_every=[10,30min]", "ema.every=5"]
    known = build_run([*words, "strategy=auto"], Launch()).strategy.cadences
    assert known == Cadences((Interval(7),), (Interval(epochs=2),), (Interval(10), Interval(seconds=1800)), average=())
    assert build_run([*words, "ema.decay=0.9"], Launch()).strategy.cadences.average == (Interval(5),)


def test_a_start_that_is_refused_late_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"checkpoint\.best=makro: the task's metrics are"):
        here(*WORDS, f"run.root={tmp_path / 'runs'}", "checkpoint.best=makro")
    assert list((tmp_path / "runs").iterdir()) == []


def test_in_a_folder_that_was_there_it_does_not_stay_running(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"checkpoint\.best=makro: the task's metrics are"):
        here(*WORDS, f"run.dir={tmp_path}", "checkpoint.best=makro")
    said = status(tmp_path)
    assert said["state"] == "failed"
    assert said["reason"].startswith("checkpoint.best=makro")
