"""A request to stop is heard in an evaluation and after a save, and the run that goes on shows no trace of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, curve, finish, lines, single, status
from tests.inside import here
from tests.strategies.toys import BATCH, Net, Plain, ToyData
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.loop.evaluation import evaluate
from trainer.loop.trainer import Trainer
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies import rank_context
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.strategies.parallel_model import ParallelModel

# 360 samples are evaluated, 60 at once
WORDS = (
    *SMALL,
    "loop.global_batch=120",
    "loop.steps=5",
    "loop.eval_every=2",
    "loop.eval_batch=60",
)


def asked_during(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, times: int = 1
) -> Callable[[], int]:
    """SIGTERM arrives in this call of a method, counted from 1; what is returned tells how many calls there were."""
    before, calls = getattr(owner, name), []

    def counting(*args: Any, **words: Any) -> Any:
        calls.append(args)
        for _ in range(times if len(calls) == call else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return before(*args, **words)

    monkeypatch.setattr(owner, name, counting)
    return lambda: len(calls)


def figures(folder: Path) -> dict[str, Any]:
    """Of each checkpoint."""
    return {path.parent.name: json.loads(path.read_text())["figures"] for path in folder.glob("checkpoints/*/mani*")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("stopping")
    assert here(*WORDS, f"run.dir={folder}") == 0
    return folder


def same(folder: Path, whole: Path) -> None:
    """The two runs cannot be told apart by what they learned and measured."""
    assert lines(folder, "eval") == lines(whole, "eval")
    assert curve(folder, "loss_hex") == curve(whole, "loss_hex")
    stopped, undisturbed = figures(folder), figures(whole)
    shared = stopped.keys() & undisturbed.keys()  # each stop saved one more, for which an older one may have gone
    assert max(undisturbed) in shared
    assert {step: stopped[step] for step in shared} == {step: undisturbed[step] for step in shared}
    assert (status(folder)["state"], status(folder)["step"], status(folder)["goodput"]) == ("completed", 5, 1.0)


def test_an_evaluation_that_was_broken_off_is_made_up_for(whole, tmp_path, monkeypatch):
    folder = tmp_path
    # the first attempt rehearses 1 batch and evaluates 6 of step 2; the second begins with step 2's
    for call, step, evaluated in ((4, 2, []), (1 + 6 + 6 + 3, 5, [2, 4])):
        with monkeypatch.context() as patch:
            count = asked_during(patch, ParallelModel, "evaluate", call)
            assert here(*WORDS, f"run.dir={folder}") == 75
            assert count() == call + 1  # the rest of the set was not looked at
        assert (status(folder)["state"], status(folder)["step"]) == ("preempted", step)
        assert [line["step"] for line in lines(folder, "eval")] == evaluated
        assert len(curve(folder)) == step
        torn = {"kind": "eval", "step": step, "loss": -1.0}  # as of a run that died between this line and its save
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(torn) + "\n")
    assert here(*WORDS, f"run.dir={folder}") == 0
    same(folder, whole)


@pytest.mark.long
def test_time_that_is_over_at_once_still_gets_further_at_each_start(whole, tmp_path):
    codes = [here(*WORDS, f"run.dir={tmp_path}", "run.stop_after=0.001") for _ in range(6)]
    assert codes == [75, 75, 75, 75, 75, 0]  # evaluations of steps 2, 4 and 5 were due, and done by the next start
    same(tmp_path, whole)


@pytest.mark.parametrize("times", [1, 2])
def test_a_request_during_a_save_is_heard_when_it_is_done(tmp_path, monkeypatch, times):
    asked_during(monkeypatch, CheckpointManager, "save", 1, times)
    assert here(*WORDS, f"run.dir={tmp_path}") == 75
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("preempted", 2)  # no step more, no second save
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("name", "code"), [("train_step", 75), ("save", 0)])
def test_a_request_in_the_last_step_or_its_save_loses_nothing(whole, tmp_path, monkeypatch, name, code):
    """In the step: the last evaluation is made up for. In the save: everything is done."""
    before = getattr(Trainer, name)

    def asked(trainer: Trainer, *args: Any) -> Any:
        if trainer.progress.step >= (4 if name == "train_step" else 5):
            os.kill(os.getpid(), signal.SIGTERM)
        return before(trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, asked)
        assert here(*WORDS, f"run.dir={tmp_path}") == code
    assert (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").is_file()
    assert here(*WORDS, f"run.dir={tmp_path}") == 0
    same(tmp_path, whole)


KILLED = """
import os, signal
from pathlib import Path

from recipes.vision.classification import Classification


class Killed(Classification):
    seen = 0

    def metrics(self, output, target):
        Killed.seen += 1  # batches, from the rehearsal on
        if Killed.seen == 1 + 6 + 3 and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().metrics(output, target)
"""


def test_an_evaluation_that_was_killed_is_done_again_and_stands_there_once(whole, tmp_path):
    (tmp_path / "lab.py").write_text(KILLED)
    lab = ("task._target_=lab.Killed", "trust=[lab]", "checkpoint.asynchronous=false")  # step 2 is on the disk by then
    words = single(*WORDS, "device=cpu", "log=[]", *lab, "run.dir=run")
    finish(words, tmp_path, code=-signal.SIGKILL)
    folder = tmp_path / "run"
    assert [line["step"] for line in lines(folder, "eval")] == [2]  # and in that of step 4 it was killed
    finish(words, tmp_path)
    assert status(folder)["resume_step"] == 2
    assert lines(folder, "eval") == lines(whole, "eval")
    assert curve(folder, "loss_hex") == curve(whole, "loss_hex")


def one_rank_is_asked(launch: Launch) -> tuple[Any, int, int]:
    """What its evaluation gives, how many batches it asked at, and in which step of a loop all have heard of it."""
    data, seen = ToyData(), []
    with (
        pytest.MonkeyPatch.context() as patch,
        DDP(machine=Machine(launch=launch, device="cpu", precision="fp32")) as strategy,
    ):
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, 1, LoaderOptions())
        evaluation = EvalLoader(data, data.evaluation(), strategy.slice, 10, 1, LoaderOptions())
        parallel_model = strategy.build(Plain(), Net(), stream.example())

        def asked() -> bool:
            seen.append(launch.rank)
            return launch.rank == 1 and len(seen) >= 3

        patch.setattr(
            rank_context, "VOTE_INTERVAL", 0
        )  # steps that are longer than the time between two votes: each has one
        figures = evaluate(strategy, parallel_model, Plain(), evaluation, asked)
        patch.setattr(
            rank_context, "VOTE_INTERVAL", 1e9
        )  # very short ones: after the first two there are as many as may be
        loop, step, heard = strategy.votes(), 0, False
        while not heard:
            step += 1
            loop.ask(launch.rank == 1 and step >= 3)
            (heard,) = loop.read()
        return figures, len(seen), step


def test_all_ranks_break_off_at_the_same_batch_and_the_same_step(processes):
    assert processes.run(2, one_rank_is_asked) == [(None, 3, 2 + rank_context.MAX_VOTE_STEPS)] * 2
