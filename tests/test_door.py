"""`trainer.run`, and `python -m trainer processes=N`: the same run from Python, and without a launcher."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

import trainer
from tests.commands import SMALL, Command, curve, finish, single, status

DOCS = Path(__file__).parents[1] / "docs"
WORDS = (
    *SMALL,
    "device=cpu",
    "log=[]",
    "loop.steps=12",
    "loop.global_batch=120",
    "loop.eval_every=6",
    "optimizer.lr=0.01",
)
BLOCK = re.compile(r"^`(\w+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BREAKS = """
from torch import nn

def breaks(**shape) -> nn.Module:
    raise KeyError("mine")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_from_python_is_that_of_the_command_line_and_again(place: Path) -> None:
    handlers = logging.getLogger().handlers[:]
    first = trainer.run([*WORDS, "run.name=first"])
    assert (first.state, first.folder) == ("completed", place / "runs" / "first")
    assert status(first.folder)["state"] == "completed"
    second = trainer.run([*WORDS, "strategy=ddp", "loop.micro_batches=2"])
    assert second.metrics == pytest.approx(first.metrics, abs=1e-6)
    assert second.metrics.keys() == {"loss", "accuracy", "macro_accuracy"}
    finish(single(*WORDS, "run.name=typed"), place)
    assert curve(place / "runs" / "typed", "loss_hex") == curve(first.folder, "loss_hex")
    # nothing of a run is left in the process: no handler, no group, no lock
    assert logging.getLogger().handlers == handlers
    assert not distributed.is_initialized()
    assert trainer.run([*WORDS, "run.name=first", "loop.steps=24", "run.accept_changes=true"]).state == "completed"


def test_what_it_has_left_can_be_used_at_once(place: Path) -> None:
    result = trainer.run([*WORDS, "run.name=first"])
    network = result.network
    assert (type(network).__name__, network.training, len(list(network.parameters()))) == ("MLP", False, 6)
    with torch.no_grad():
        assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert trainer.run(["job=evaluate", "job.checkpoint=last", "run.name=first"]).metrics == result.metrics


def test_a_refusal_is_an_exception_and_an_error_is_itself(place: Path) -> None:
    (place / "breaking.py").write_text(BREAKS)
    with pytest.raises(trainer.Refusal, match="did you mean 'mlp'"):
        trainer.run(["model=mpl"])
    with pytest.raises(trainer.Refusal, match="global_batch 101 / 2 data ranks"):
        trainer.run([*WORDS, "loop.global_batch=101"], processes=2)
    with pytest.raises(KeyError, match="mine"):
        trainer.run([*WORDS, "model._target_=breaking.breaks", "trust=[breaking]"])
    # inside the loop, where ranks would wait for each other
    with pytest.raises(FloatingPointError, match="the loss up to step"):
        trainer.run([*WORDS, "run.name=broken", "strategy=ddp", "optimizer.lr=1e30"])
    assert status(place / "runs" / "broken")["state"] == "failed"
    assert trainer.run([*WORDS, "strategy=ddp"]).state == "completed"
    with pytest.raises(trainer.Refusal, match="does one run"):
        trainer.run(["-m", "seed=1,2"])


@pytest.mark.slow
def test_several_processes_give_back_what_the_first_has(place: Path) -> None:
    alone, two = trainer.run([*WORDS, "run.name=alone"]), trainer.run([*WORDS, "run.name=two"], processes=2)
    assert (two.state, status(two.folder)["world_size"], status(two.folder)["strategy"]) == ("completed", 2, "ddp")
    assert two.metrics == pytest.approx(alone.metrics, abs=1e-6)
    for one, other in zip(alone.network.parameters(), two.network.parameters(), strict=True):
        assert torch.allclose(one, other, 0, 1e-5)
    with pytest.raises(RuntimeError, match="the loss up to step"):
        trainer.run([*WORDS, "run.name=broken", "optimizer.lr=1e30"], processes=2)


SLOW = """
import time
from recipes.vision.classification import Classification

class Slow(Classification):
    def after_step(self, network, step):
        open("stepping", "w").close()
        time.sleep(3600)
"""


@pytest.mark.slow
def test_the_command_starts_them_itself_and_ends_as_the_run_does(place: Path) -> None:
    spoken = [word for word in WORDS if word != "log=[]"]
    endless = (*spoken, "log=[console]", "processes=2", "loop.steps=1000000", "loop.eval_every=null")
    command = Command(single(*endless, "run.name=once"), place)
    command.wait_for_step(place / "runs" / "once", 1)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (75, []), ended.screen
    assert status(place / "runs" / "once")["state"] == "preempted"
    (last,) = ended.screen.splitlines()[-1:]
    assert last.startswith("  python -m trainer ")
    assert "processes=2" in last

    # what cannot be is one sentence, early and late
    for wrong in ("loop.global_batch=101", "model=mpl"):
        assert len(finish(single(*WORDS, "processes=2", wrong), place, code=2).splitlines()) == 1

    # a second request ends at once what will never get to its end
    (place / "lab.py").write_text(SLOW)
    command = Command(single(*endless, "run.name=twice", "task._target_=lab.Slow", "trust=[lab]"), place)
    wait_for(place / "stepping")
    os.kill(command.pid, signal.SIGINT)
    time.sleep(1)  # a terminal may deliver one Ctrl-C twice: only a later one is another
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (1, []), ended.screen
    assert "interrupted twice" in ended.screen.splitlines()[-1]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.py", "points.py"])
def test_the_examples_of_the_page_run(place: Path, name: str, processes: object) -> None:
    code = dict(BLOCK.findall((DOCS / "python.md").read_text()))[name]
    assert len([line for line in code.splitlines() if line]) <= 25
    (place / name).write_text(code)
    screen = finish([sys.executable, name], place)
    assert {"train.py": "completed 0.", "points.py": "[[1.0000, 1.0000"}[name] in screen
