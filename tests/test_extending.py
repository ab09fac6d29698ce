"""The pages for labs: their files, copied out of the pages as a reader would, do what the pages say."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ranks import Processes
from tests.run import ROOT, Finished, curve, far, lines, run

DOCS = ROOT / "docs"
WAVES = ("--config-dir", "lab/conf", "experiment=waves", "loop.log_every=1")
# a paragraph that begins with a file's name, and the block of code behind it
FILE = re.compile(r"^`(lab/[\w/.]+)`[^\n]*\n(?:[^\n]+\n)*\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab of both pages."""
    place = tmp_path_factory.mktemp("home")
    for page in ("extending.md", "own-strategy.md"):
        for name, text in FILE.findall((DOCS / page).read_text()):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    return place


def train(home: Path, *words: str, ranks: int = 1, code: int = 0) -> Finished:
    return run([*WAVES, *words], ranks, "group" if ranks > 1 else "here", place=home, code=code)


@pytest.mark.long
def test_the_lab_ends_with_the_figure_that_the_page_names(home: Path, processes: Processes) -> None:
    said = re.search(r"completed   step 300, rms ([\d.]+)", (DOCS / "extending.md").read_text())
    assert said is not None
    for size, word in ((1, "single"), (2, "ddp"), (2, "tp")):
        seldom = ["loop.save_every=null", "loop.eval_every=null", "loop.log_every=null"]
        train(home, f"run.dir={word}", f"strategy={word}", *seldom, ranks=size)
        last = lines(home / word, "eval")[-1]
        # signs of gradients blow rounding up, and kinds of processors round in other ways
        assert (last["step"], last["rms"]) == (300, pytest.approx(float(said[1]), rel=0.05))


BRIEF = ("schedule=constant", "loop.epochs=null")


def test_a_sink_of_a_lab_is_cut_back_when_a_run_goes_on(home: Path) -> None:
    words = ["run.dir=table", "log=[table]", *BRIEF]
    for steps in (4, 6):
        train(home, *words, f"loop.steps={steps}")
    rows = list(csv.DictReader((home / "table" / "train.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row["loss"]) for row in rows] == curve(home / "table")


def test_a_mean_that_is_weighted_by_class_is_the_same_however_a_batch_is_divided(
    home: Path, processes: Processes
) -> None:
    (home / "lab" / "conf" / "task" / "weighted.yaml").write_text("_target_: lab.weighted.Weighted\nweights: ???\n")
    weights = f"task.weights={[1.0, 9.0, 0.5, *[1.0] * 7]}".replace(" ", "")
    words = ["experiment=null", "data=digits", "model=mlp", "task=weighted", weights, "precision=fp64", "loop.steps=4"]
    ways = {"whole": (1, []), "micro": (1, ["loop.micro_batches=4"]), "ddp": (2, ["strategy=ddp"])}
    for name, (size, own) in ways.items():
        train(home, *words, *own, f"run.dir=weighted_{name}", ranks=size)
        assert far(curve(home / f"weighted_{name}"), curve(home / "weighted_whole")) < 1e-12
        found, whole = (lines(home / f"weighted_{each}", "eval")[-1] for each in (name, "whole"))
        assert (found["accuracy"], found["loss"]) == (whole["accuracy"], pytest.approx(whole["loss"]))


def test_a_job_of_a_lab_opens_a_trained_run(home: Path, processes: Processes) -> None:
    train(home, "run.dir=normed", *BRIEF, "loop.steps=4")
    words = ["--config-dir", "lab/conf", "run.dir=normed", "job=norms", "job.top=3"]
    first, *rows = run(words, place=home).out.splitlines()
    assert "one process reads the checkpoint" in run(words, 2, "group", place=home, code=2).out
    assert first == "checkpoint  step 4"
    (file,) = (home / "normed" / "checkpoints" / "step-00000004").glob("*-model-00001-of-*.safetensors")
    norms = {name: float(weight.norm()) for name, weight in load_file(file).items()}
    largest = sorted(norms, key=norms.__getitem__, reverse=True)[:3]
    assert [row.split() for row in rows] == [[f"{norms[name]:.4g}", name] for name in largest]


def test_a_schedule_of_a_lab_decides_the_rate(home: Path) -> None:
    words = ["loop.epochs=null", "schedule=teeth", "schedule.length=4", "schedule.warmup=2", "loop.steps=6"]
    train(home, "run.dir=teeth", *words)
    factors = [0.5, 1, 0.55, 0.325, 1, 0.775]
    assert curve(home / "teeth", "lr") == pytest.approx([1e-3 * factor for factor in factors])


PLAIN = (*BRIEF, "optimizer=sgd", "optimizer.lr=0.01", "loop.steps=12")
LOCAL = (*BRIEF, "optimizer=adamw", "strategy.every=4")
RARELY = ("loop.eval_every=null", "loop.save_every=null")
OFTEN = ("loop.eval_every=3", "loop.save_every=5")


def test_the_first_strategy_of_the_page_steps_by_signs(home: Path) -> None:
    plain = ("momentum=0", "nesterov=false", "weight_decay=0", "lr=0.5")
    sgd = ["optimizer=sgd", *(f"optimizer.{word}" for word in plain)]
    words = ["strategy=majority", *sgd, *BRIEF, "loop.steps=2"]
    train(home, "run.dir=signs", *words, "loop.save_every=1")
    kept = sorted((home / "signs" / "checkpoints").glob("step-*"))
    before, after = ({k: x for file in at.glob("*.safetensors") for k, x in load_file(file).items()} for at in kept)
    moved = [(after[name] - before[name]) * 2 for name in before if name.endswith(("weight", "bias"))]
    assert len(moved) == 6
    assert {round(x, 5) for tensor in moved for x in tensor.flatten().tolist()} <= {-1.0, 0.0, 1.0}
    assert all(tensor.any() for tensor in moved)


def stored(folder: Path) -> list[str]:
    """The names in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return [name for file in newest.glob("*.safetensors") for name in load_file(file)]


@pytest.mark.long
def test_a_strategy_of_a_lab_keeps_the_contract_that_the_page_names(home: Path, processes: Processes) -> None:
    def two(name: str, strategy: str, *words: str) -> Path:
        return train(home, f"run.dir={name}", f"strategy={strategy}", *words, ranks=2).folder

    averaged = two("averaged", "ddp", *PLAIN)
    averaging = ("strategy.outer_lr=1", "strategy.outer_momentum=0")
    every_1 = two("every1", "diloco", "strategy.every=1", *averaging, *PLAIN)
    every_8 = two("every8", "diloco", "strategy.every=8", *PLAIN)
    assert far(curve(every_1), curve(averaged)) < 1e-5
    assert far(curve(every_8), curve(averaged)) > 1e-4  # they do go ways of their own
    for folder in (every_1, every_8):
        assert curve(folder, "sample_digest") == curve(averaged, "sample_digest")

    # stopped between two outer steps, with evaluations and saves in many places, and the other with none until its end
    whole = two("whole", "diloco", *LOCAL, *RARELY, "loop.steps=12")
    parts = two("parts", "diloco", *LOCAL, *OFTEN, "loop.steps=6")
    said = lines(parts, "eval")[-1]
    # what was evaluated and saved is one network, with which any number of processes of any strategy goes on: where
    # they do not learn, they find the same figures
    still = ["run.resume=parts", "optimizer.lr=0", "run.accept_changes=true", *BRIEF, "optimizer=adamw", "loop.steps=7"]
    for strategy in ("single", "diloco"):
        train(home, f"run.dir=still-{strategy}", f"strategy={strategy}", *still)
        found = lines(home / f"still-{strategy}", "eval")[-1]
        kept = {name for name in stored(home / f"still-{strategy}") if name.startswith("strategy/")}
        assert {name.split("/")[2] for name in kept} == (set() if strategy == "single" else {"0of1", "all"})
        assert (found["step"], said["step"]) == (7, 6)
        assert (found["rms"], found["loss"]) == pytest.approx((said["rms"], said["loss"]), rel=1e-5)
    two("parts", "diloco", *LOCAL, *OFTEN, "loop.steps=12")
    assert curve(parts, "loss_hex") == curve(whole, "loss_hex")
    assert [line["step"] for line in lines(parts, "eval")] == [3, 6, 9, 12]
    assert lines(parts, "eval")[-1] == lines(whole, "eval")[-1]


@pytest.mark.long
def test_a_curve_of_its_own_is_not_called_the_same(home: Path, processes: Processes) -> None:
    train(home, "job=verify", "run.dir=recorded", "job.record=reference.safetensors")
    own = ["run.dir=verified", "job.reference=reference.safetensors", "strategy=diloco", "strategy.every=2"]
    said = train(home, "job=verify", *own, ranks=2).out
    assert said.startswith("OWN CURVE: diloco on 2, on purpose; initial values, samples, forward and loss of step 1 ")
    assert "First other at step 1, gradient, " in said


def test_what_a_strategy_of_a_lab_refuses_leaves_nothing(home: Path) -> None:
    for words, said in (
        (["strategy.every=0"], "the first is 1 or more"),
        (["precision=fp16"], "its own loss scale"),
        (["strategy.every=4", "ema.decay=0.9", "ema.every=6"], "ema.every must be a multiple of strategy.every=4"),
        (["loop.on_nonfinite=skip"], "skip steps of its own"),
    ):
        assert said in train(home, "run.dir=none", "strategy=diloco", *words, code=2).out
    assert not (home / "none").exists()
    both = ["strategy.every=4", "ema.decay=0.9", "ema.every=8", *BRIEF, "loop.steps=1"]
    train(home, "run.dir=both", "strategy=diloco", *both)
