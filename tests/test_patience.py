"""What follows figures: a run that ends early (loop.patience), a rate that falls (schedule=plateau)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.commands import SMALL, curve, lines, status
from tests.inside import product
from tests.processes import Processes
from tests.strategies.toys import Net, Plain, ToyData
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader
from trainer.launch.rendezvous import Launch
from trainer.loop.evaluation import evaluate
from trainer.messages import Refusal
from trainer.records.metrics_reader import best_word
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine

# the rate is so small that no evaluation is better than the first
WORDS = [*SMALL, "optimizer.lr=1e-30", "schedule=constant", "loop.global_batch=120", "loop.eval_every=2"]
FALLING = ["schedule=plateau", "schedule.factor=0.5", "schedule.patience=0"]


def run(place: Path, name: str, *words: str) -> Path:
    assert product(Launch(), place, [*WORDS, f"run.dir={name}", *words]) == 0
    return place / name


def steps(folder: Path, kind: str) -> list[int]:
    return [line["step"] for line in lines(folder, kind)]


def test_a_run_ends_where_nothing_became_better_and_says_what_extends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["loop.steps=20", "loop.patience=2"]
    folder = run(tmp_path, "run", *words, "loop.log_every=4")
    assert (steps(folder, "eval"), steps(folder, "train")) == ([2, 4, 6], [4, 6])  # the last step has its line
    assert (folder / "checkpoints" / "step-00000006").is_dir()
    said = status(folder)
    assert (said["state"], said["step"]) == ("completed", 6)
    assert said["reason"] == "2 evaluations in a row without improvement: loop.patience"
    capsys.readouterr()
    run(tmp_path, "run", *words)
    told = capsys.readouterr().out
    assert "complete at step 6: 2 evaluations in a row without improvement" in told
    assert "a larger loop.patience extends it" in told
    assert steps(run(tmp_path, "run", "loop.steps=20", "loop.patience=3"), "eval") == [2, 4, 6, 8]
    assert steps(run(tmp_path, "run", "loop.steps=12"), "eval") == [2, 4, 6, 8, 10, 12]
    assert status(folder)["reason"] is None


@pytest.mark.long
def test_where_all_are_right_the_loss_says_which_is_best_and_the_run_still_ends(tmp_path: Path) -> None:
    words = [*SMALL, "data=synthetic_images", "data.image_size=8", "data.num_classes=2", "loop.global_batch=64"]
    words += ["loop.steps=48", "loop.eval_every=3", "loop.save_every=null", "checkpoint.keep=1", "schedule=constant"]
    assert product(Launch(), tmp_path, [*words, "run.dir=run"]) == 0
    perfect = [line for line in lines(tmp_path / "run", "eval") if line["accuracy"] == 1]
    least = min(perfect, key=lambda line: line["loss"])
    assert least["step"] > perfect[0]["step"] + 3
    told = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"best        accuracy 1.0000 at step {least['step']}: " in told
    # whoever asks for the best gets that one: jobs, and a run that begins with its weights
    assert product(Launch(), tmp_path, ["run.dir=run", "job=evaluate"]) == 0
    assert lines(tmp_path / "run" / "evaluate", "eval")[0]["checkpoint"] == least["step"]
    assert product(Launch(), tmp_path, [*words, "run.dir=next", "init_from=run", "loop.steps=1"]) == 0
    assert f"step-{least['step']:08}" in (tmp_path / "next" / "logs" / "rank-0.log").read_text()
    # the figure alone counts for patience: a loss may fall for ever
    assert product(Launch(), tmp_path, [*words, "run.dir=impatient", "loop.patience=2"]) == 0
    assert status(tmp_path / "impatient")["step"] == perfect[0]["step"] + 6


def test_the_last_step_has_its_line_where_only_a_clock_asks_for_evaluations(tmp_path: Path) -> None:
    words = ["loop.eval_every=0.001s", "loop.steps=1000000", "loop.log_every=1000000", "loop.patience=2"]
    folder = run(tmp_path, "run", *words)
    assert steps(folder, "train") == [status(folder)["step"]] == steps(folder, "eval")[2:]
    assert "grad_norm" in lines(folder, "train")[0]


def test_another_folder_counts_from_its_own_beginning(tmp_path: Path) -> None:
    run(tmp_path, "first", "loop.steps=20", "loop.patience=1")
    second = run(tmp_path, "second", "loop.steps=20", "loop.patience=1", "run.resume=first")
    assert steps(second, "eval") == [6, 8]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_all_ranks_decide_the_same(tmp_path: Path, processes: Processes, strategy: str) -> None:
    words = [*WORDS, *FALLING, f"strategy={strategy}", "loop.steps=20", "loop.patience=3", "run.dir=two"]
    assert processes.run(2, product, tmp_path, words) == [0, 0]
    assert [rate / 1e-30 for rate in curve(tmp_path / "two", "lr")] == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])
    assert status(tmp_path / "two")["step"] == 8


class Dicing(Plain):
    """A task whose figure each rank draws for itself."""

    def finish(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"drawn": random.random()}


def drawn(launch: Launch) -> dict[str, float] | None:
    """What an evaluation gives this rank."""
    random.seed(launch.rank)
    data, task = ToyData(), Dicing()
    with DDP(machine=Machine(launch=launch, device="cpu")) as strategy:
        stream = EvalLoader(data, data.evaluation(), strategy.slice, 50, 1, LoaderOptions())
        return evaluate(strategy, strategy.build(task, Net(), stream.example()), task, stream, lambda: False)


def test_figures_are_the_main_ranks_on_all_ranks(processes: Processes) -> None:
    one, other = processes.run(2, drawn)
    assert one == other


def test_what_was_counted_survives_a_stop_and_a_better_figure_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, "run", "loop.steps=4", "loop.patience=2")
    assert steps(run(tmp_path, "run", "loop.steps=20", "loop.patience=2"), "eval") == [2, 4, 6]
    better = run(tmp_path, "better", "optimizer.lr=1e-3", "checkpoint.best=-loss", "loop.steps=12", "loop.patience=1")
    assert status(better)["step"] == 12


def test_a_rate_falls_where_nothing_became_better_and_goes_on_falling_after_a_stop(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", *FALLING, "schedule.min=0.2", "loop.steps=10")
    parts_of_it = [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]
    assert [rate / 1e-30 for rate in curve(whole, "lr")] == pytest.approx(parts_of_it)
    for bound in (4, 10):
        parts = run(tmp_path, "parts", *FALLING, "schedule.min=0.2", f"loop.steps={bound}")
    assert curve(parts, "lr") == curve(whole, "lr")
    rising = [
        *FALLING,
        "schedule.figure=-accuracy",
        "optimizer.lr=1e-3",
        "loop.steps=6",
    ]  # smaller is better: it never is
    assert curve(run(tmp_path, "other", *rising), "lr")[-1] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loop.patience=2", "loop.eval_every=null"], "loop.patience=2 counts evaluations, and loop.eval_every=null"),
        ([*FALLING, "loop.eval_every=null"], "schedule=plateau counts evaluations"),
        (["loop.patience=2", "data=synthetic_images", "data.evaluation_size=0"], "no evaluation set to measure it on"),
        ([*FALLING, "schedule.figure=acuracy"], "schedule.figure=acuracy: the task's metrics are .*'accuracy'"),
        ([*FALLING, "schedule.figure=loss"], "schedule.figure=loss: the largest .* schedule.figure=-loss takes"),
        (["checkpoint.best=val_loss"], r"checkpoint\.best=val_loss: the task's metrics are -loss, .*'-loss'"),
        ([*FALLING, "schedule.factor=1.5"], "schedule.factor is 1.5"),
        (["loop.patience=0"], "loop.patience=0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        run(tmp_path, "no", *words)


def test_losses_and_errors_are_wanted_small() -> None:
    small = ["loss", "ema_loss", "val_loss", "perplexity", "bpb", "RMSE", "mae", "top1_error"]
    assert [best_word(name) for name in small] == [f"-{name}" for name in small]
    large = ["accuracy", "lossless", "neg_log_loss", "error_free", "map50"]
    assert [best_word(name) for name in large] == large
