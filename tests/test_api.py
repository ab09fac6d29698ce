"""`trainer.run`, and `python -m trainer processes=N`: the same run from Python, and without a launcher."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed

import trainer
from tests.run import ROOT, SMALL, Command, run, start, status
from trainer.launch import stop_signals

DOCS = ROOT / "docs"
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
    typed = run([*WORDS, "run.name=typed"], place=place)
    assert typed.curve("loss_hex") == run([*WORDS, "run.name=first"], place=place).curve("loss_hex")
    # nothing of a run is left in the process: no handler, no group, no lock
    assert logging.getLogger().handlers == handlers
    assert not distributed.is_initialized()
    assert trainer.run([*WORDS, "run.name=first", "loop.steps=24", "run.accept_changes=true"]).state == "completed"
    # what it has left can be used at once
    network = second.network
    assert (type(network).__name__, network.training, len(list(network.parameters()))) == ("MLP", False, 6)
    with torch.no_grad():
        assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    evaluated = trainer.run(["job=evaluate", "job.checkpoint=last", f"run.dir={second.folder}"])
    assert evaluated.metrics == second.metrics


def test_a_refusal_is_an_exception_and_an_error_is_itself(place: Path) -> None:
    (place / "breaking.py").write_text(BREAKS)
    with pytest.raises(trainer.Refusal, match="did you mean 'mlp'") as refused:
        trainer.run(["model=mpl"])
    assert [frame.name for frame in traceback.extract_tb(refused.tb)][1:] == ["run"]
    with pytest.raises(trainer.Refusal, match=r"one text.*trainer\.run\(\['model=mlp', 'loop\.steps=3'\]\)"):
        trainer.run("model=mlp loop.steps=3")
    with pytest.raises(KeyError, match="mine"):
        trainer.run([*WORDS, "model._target_=breaking.breaks", "trust=[breaking]"])
    # inside the loop, where ranks would wait for each other
    with pytest.raises(FloatingPointError, match=r"step \d+: the loss is"):
        trainer.run([*WORDS, "run.name=broken", "strategy=ddp", "optimizer.lr=1e30"])
    assert status(place / "runs" / "broken")["state"] == "failed"
    assert trainer.run([*WORDS, "strategy=ddp"]).state == "completed"
    for flags in (["-m", "seed=1,2"], ["--help"], ["--cfg", "job"]):
        with pytest.raises(trainer.Refusal, match="does one run"):
            trainer.run(flags)


def test_who_was_started_by_a_launcher_starts_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(trainer.Refusal, match=r"processes=2: a launcher started this process, as WORLD_SIZE=1 in its"):
        trainer.run(WORDS, processes=2)


def test_more_processes_than_the_memory_bears_are_refused() -> None:
    with pytest.raises(trainer.Refusal, match=r"a process takes 0\.4 GB at least, .*; at most processes=\d+$"):
        trainer.run(WORDS, processes=10_000_000)


ASKING = """
import os
import signal
from recipes.vision.classification import Classification

class Asking(Classification):
    def __init__(self, times: int, label_smoothing: float, num_classes: int) -> None:
        super().__init__(label_smoothing, num_classes)
        self.times = times

    def after_step(self, network, step):
        if step == 3:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_stops_and_saves_and_a_second_one_leaves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(stop_signals, "_SAME_SIGNAL", -1.0)  # nobody delivers one twice here
    before = signal.getsignal(signal.SIGINT)
    (place / "asking.py").write_text(ASKING)
    own = ["task._target_=asking.Asking", "trust=[asking]", "loop.steps=1000000", "loop.eval_every=null"]
    words = [*WORDS, *own, "schedule=constant", "strategy=ddp", "run.name=asked"]
    once = trainer.run([*words, "+task.times=1"])
    assert (once.state, status(once.folder)["reason"]) == ("preempted", "SIGINT")
    with pytest.raises(KeyboardInterrupt):
        trainer.run([*words, "+task.times=2", "run.resume=fresh"])
    ended = status(once.folder)
    assert (ended["state"], ended["reason"].split(":")[:2]) == ("failed", ["KeyboardInterrupt", " interrupted twice"])
    # nothing is left that the next one could stumble over: no group, no lock, no handler
    assert signal.getsignal(signal.SIGINT) is before
    assert trainer.run([*words, "+task.times=0", "loop.steps=4"]).state == "completed"


def test_it_runs_in_a_thread_and_while_an_event_loop_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def in_the_loop() -> str:
        endless = [*WORDS, "loop.steps=1000000", "loop.eval_every=null", "run.stop_after=0.001"]
        there = await asyncio.to_thread(trainer.run, endless)
        return f"{there.state} {trainer.run(WORDS).state}"

    before = threading.active_count()
    assert asyncio.run(in_the_loop()) == "preempted completed"
    assert capsys.readouterr().err.count("Ctrl-C does not reach a run in a thread; run.stop_after=… ends it") == 1
    assert threading.active_count() == before


LEAVING = """
import os
import sys
from recipes.vision.classification import Classification

class Own(Classification):
    def __init__(self, label_smoothing: float, num_classes: int, at: int = 0) -> None:
        super().__init__(label_smoothing, num_classes)
        self.at = at
    def after_step(self, network, step):
        if step == self.at and os.environ["RANK"] == "1": sys.exit(3)
"""


@pytest.mark.long
def test_several_processes_give_back_what_the_first_has(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a module that only this program's own path leads to
    (place / "mine").mkdir()
    (place / "mine" / "own.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(place / "mine")
    own = ["task._target_=own.Own", "trust=[own]"]
    alone = trainer.run([*WORDS, "run.name=alone"])
    two = trainer.run([*WORDS, *own, "log=[console]", "run.name=two"], processes=2)
    # pytest, like a notebook, has put another stream into the place of the screen
    assert "completed   step 12" in capsys.readouterr().out
    assert (two.state, status(two.folder)["world_size"], status(two.folder)["strategy"]) == ("completed", 2, "ddp")
    assert two.metrics == pytest.approx(alone.metrics, abs=1e-6)
    for one, other in zip(alone.network.parameters(), two.network.parameters(), strict=True):
        assert torch.allclose(one, other, 0, 1e-5)
    with pytest.raises(trainer.Refusal, match="global_batch 101 / 2 data ranks"):
        trainer.run([*WORDS, "loop.global_batch=101"], processes=2)
    # one rank leaves in the middle: it says so itself, and the other is silent
    with pytest.raises(RuntimeError, match=r"left by sys\.exit\(3\), at .*own\.py:11, before the run was done"):
        trainer.run([*WORDS, *own, "+task.at=3", "run.name=left"], processes=2)
    screen = capsys.readouterr().err
    assert screen.startswith("rank 1 of 2 failed at step 3:\n")
    assert "killed" not in screen
    left = status(place / "runs" / "left")
    assert (left["state"], left["root_rank"], left["reason"][:21]) == ("failed", 1, "RuntimeError: this pr")


@pytest.mark.long
def test_the_command_starts_them_itself_and_ends_as_the_run_does(place: Path) -> None:
    spoken = [word for word in WORDS if word != "log=[]"]
    endless = (*spoken, "log=[console]", "processes=2", "loop.steps=1000000", "loop.eval_every=null")
    once = place / "runs" / "once"
    command = start([*endless, "run.name=once", "distributed.restarts=1"], place=place)
    command.wait_for_step(once, 1)
    # what is killed is started again, and then takes requests as before
    os.kill(command.rank(0), signal.SIGKILL)  # the rank that serves the store
    until = time.monotonic() + 120
    while status(once)["attempt"] == 1:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (75, []), ended.out
    assert (status(once)["state"], status(once)["attempt"]) == ("preempted", 2)
    (told,) = re.findall("^restart     from .*", ended.out, re.MULTILINE)
    assert "Another process of the run ended without a message: it was killed" in told
    (last,) = ended.out.splitlines()[-1:]
    assert last.startswith("  python -m trainer ")
    assert "processes=2" in last


@pytest.mark.long
@pytest.mark.parametrize("name", ["train.py", "points.py"])
def test_the_examples_of_the_page_run(place: Path, name: str) -> None:
    code = dict(BLOCK.findall((DOCS / "python.md").read_text()))[name]
    assert len([line for line in code.splitlines() if line]) <= 25
    (place / name).write_text(code)
    ended = Command([sys.executable, name], place).end()
    assert (ended.code, ended.left) == (0, []), ended.out
    assert {"train.py": "completed 0.", "points.py": "[[1.0000, 1.0000"}[name] in ended.out
