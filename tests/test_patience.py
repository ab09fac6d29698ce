"""What follows figures: a run that ends early (loop.patience), a rate that falls (schedule=plateau)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from recipes.vision.classification import Classification
from tests.options import options
from tests.ranks import Processes
from tests.run import SMALL, Finished, quickly, run

# the rate is so small that no evaluation is better than the first
WORDS = [*SMALL, "optimizer.lr=1e-30", "schedule=constant", "loop.global_batch=120", "loop.eval_every=2"]
FALLING = ["schedule=plateau", "schedule.factor=0.5", "schedule.patience=0"]


def train(place: Path, name: str, *words: str, ranks: int = 1) -> Finished:
    how: Any = "here" if ranks == 1 else "group"
    return run([*WORDS, f"run.dir={name}", *words], ranks, how, place=place)


def steps(done: Finished, kind: str = "eval") -> list[int]:
    return [line["step"] for line in done.lines(kind)]


def rates(done: Finished) -> list[float]:
    return [rate / 1e-30 for rate in done.curve("lr")]


def test_a_run_ends_where_nothing_became_better_and_says_what_extends_it(tmp_path: Path) -> None:
    words = ["loop.steps=20", "loop.patience=2"]
    done = train(tmp_path, "run", *words, "loop.log_every=4")
    assert (steps(done), steps(done, "train")) == ([2, 4, 6], [4, 6])  # the last step has its line
    assert (done.folder / "checkpoints" / "step-00000006").is_dir()
    said = done.status
    assert (said["state"], said["step"]) == ("completed", 6)
    assert said["reason"] == "2 evaluations in a row without improvement: loop.patience"
    again = train(tmp_path, "run", *words).out
    assert "complete at step 6: 2 evaluations in a row without improvement" in again
    assert "a larger loop.patience extends it" in again
    assert steps(train(tmp_path, "run", "loop.steps=20", "loop.patience=3")) == [2, 4, 6, 8]
    assert steps(train(tmp_path, "run", "loop.steps=12")) == [2, 4, 6, 8, 10, 12]
    assert done.status["reason"] is None


@pytest.mark.long
def test_what_was_counted_survives_a_stop_and_is_a_folders_own(tmp_path: Path) -> None:
    train(tmp_path, "run", "loop.steps=4", "loop.patience=2")
    assert steps(train(tmp_path, "run", "loop.steps=20", "loop.patience=2")) == [2, 4, 6]
    assert steps(train(tmp_path, "other", "loop.steps=20", "loop.patience=1", "run.resume=run")) == [8, 10]
    # a better figure begins anew
    better = ["optimizer.lr=1e-3", "checkpoint.best=-loss", "loop.steps=12", "loop.patience=1"]
    assert train(tmp_path, "better", *better).status["step"] == 12


@pytest.mark.long
def test_where_all_are_right_the_loss_says_which_is_best_and_the_run_still_ends(tmp_path: Path) -> None:
    words = [*SMALL, "data=synthetic_images", "data.image_size=8", "data.num_classes=2", "loop.global_batch=64"]
    words += ["loop.steps=48", "loop.eval_every=3", "loop.save_every=null", "checkpoint.keep=1", "schedule=constant"]
    done = run([*words, "run.dir=run"], place=tmp_path)
    perfect = [line for line in done.lines("eval") if line["accuracy"] == 1]
    least = min(perfect, key=lambda line: line["loss"])
    assert least["step"] > perfect[0]["step"] + 3
    told = (done.folder / "logs" / "rank-0.log").read_text()
    assert f"best        accuracy 1.0000 at step {least['step']}: " in told
    # the figure alone counts for patience: a loss may fall for ever
    impatient = run([*words, "run.dir=impatient", "loop.patience=2"], place=tmp_path)
    assert impatient.status["step"] == perfect[0]["step"] + 6


class Dicing(Classification):
    """Its figure is drawn by each rank for itself."""

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"drawn": random.SystemRandom().random()}


@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp"], "ddp"))
def test_all_ranks_decide_the_same(tmp_path: Path, processes: Processes, strategy: str) -> None:
    words = [*FALLING, f"strategy={strategy}", "loop.steps=20", "loop.patience=3"]
    done = train(tmp_path, "two", *words, ranks=2)
    assert rates(done) == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])
    assert done.status["step"] == 8
    # figures are the main rank's: else one would stop and the other wait for it
    dicing = [*options(tmp_path, Dicing), "task=dicing", f"strategy={strategy}", "checkpoint.best=drawn"]
    diced = train(tmp_path, "diced", *dicing, "loop.steps=60", "loop.patience=1", "loop.eval_every=1", ranks=2)
    assert diced.status["step"] < 60


def test_a_rate_falls_where_nothing_became_better_and_goes_on_falling_after_a_stop(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *FALLING, "schedule.min=0.2", "loop.steps=10")
    assert rates(whole) == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2])
    for bound in (4, 10):
        parts = train(tmp_path, "parts", *FALLING, "schedule.min=0.2", f"loop.steps={bound}")
    assert parts.curve("lr") == whole.curve("lr")
    # smaller is better: it never is
    rising = [*FALLING, "schedule.figure=-accuracy", "optimizer.lr=1e-3", "loop.steps=6"]
    assert train(tmp_path, "other", *rising).curve("lr")[-1] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loop.patience=2", "loop.eval_every=null"], "loop.patience=2 counts evaluations, and loop.eval_every=null"),
        ([*FALLING, "loop.eval_every=null"], "schedule=plateau counts evaluations"),
        (["loop.patience=2", "data=synthetic_images", "data.evaluation_size=0"], "no evaluation set to measure it on"),
        ([*FALLING, "schedule.figure=acuracy"], "schedule.figure=acuracy: the task's metrics are "),
        ([*FALLING, "schedule.figure=loss"], "schedule.figure=loss: the largest "),
        (["checkpoint.best=val_loss"], "checkpoint.best=val_loss: the task's metrics are -loss, "),
        ([*FALLING, "schedule.factor=1.5"], "schedule.factor is 1.5"),
        (["loop.patience=0"], "loop.patience=0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in run([*WORDS, *words, "run.dir=no"], place=tmp_path, code=2).out
