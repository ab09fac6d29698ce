"""Figures that need every prediction: a task keeps something of each sample, and gets the whole set in its order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.commands import lines
from tests.inside import product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

pytestmark = pytest.mark.slow

LAB = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from trainer import Data, Task, gather

def points(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) + x[:, 0] ** 2 > 1).long())

class Points(Data):
    def train(self):
        return points(96, 0)

    def evaluation(self):
        return points(37, 1)

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def auc(scores, labels):
    order = scores.argsort(stable=True)
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = int(labels.sum())
    return (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))

class Ranked(Task):
    best = "auc"

    def loss(self, output, target):
        return cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).sum()}

    def gathered(self, output, target):
        texts = ["x" * (1 + int(y)) for y in target]
        return {"scores": output.softmax(1)[:, 1], "labels": target, "texts": texts, "ragged": list(output)}

    def finish(self, totals):
        scores, labels = totals["scores"], totals["labels"]
        assert len(scores) == len(totals["texts"]) == len(totals["ragged"])
        assert [len(text) - 1 for text in totals["texts"]] == labels.tolist()
        if len(labels) == 37:  # in the order of the set
            assert labels.tolist() == points(37, 1).tensors[1].tolist()
        order = torch.arange(float(len(scores))).double() @ scores.double()
        return {**super().finish(totals), "auc": auc(scores, labels), "in_order": order}

class Added(Ranked):
    def metrics(self, output, target):
        return {"scores_of_each": output[:, 1]}

class Kept(Ranked):
    def __init__(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import BinaryAUROC
        self.figures = {"auc": MetricCollection([BinaryAUROC()])}

class Wider(Ranked):
    def gathered(self, output, target):
        return {**super().gathered(output, target), "scores": output.new_zeros(len(target), len(target))}

class Fewer(Ranked):
    def gathered(self, output, target):
        return {"scores": output.mean(0)}

class Twice(Ranked):
    def gathered(self, output, target):
        return {**super().gathered(output, target), "loss": target}

class Named(Ranked):
    def metrics(self, output, target):
        return {"loss": (output.argmax(1) == target).sum()}

class Stepped(Ranked):
    def finish(self, totals):
        return {**super().finish(totals), "step": 0.0}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("home")
    files = {"lab.py": LAB, "conf/model/net.yaml": "_target_: ranklab.lab.net\n"}
    files |= {"conf/data/points.yaml": "_target_: ranklab.lab.Points\n"}
    for name in ("Ranked", "Added", "Kept", "Wider", "Fewer", "Twice", "Named", "Stepped"):
        files[f"conf/task/{name.lower()}.yaml"] = f"_target_: ranklab.lab.{name}\n"
    for name, text in files.items():
        (place / "ranklab" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "ranklab" / name).write_text(text)
    return place


BRIEF = ("precision=fp64", "loop.steps=6", "loop.global_batch=16", "loop.eval_every=3", "loader.workers=0")


def train(launch: Launch, home: Path, *words: str) -> Any:
    with patch.object(sys, "path", [str(home), *sys.path]):
        chosen = ["--config-dir", "ranklab/conf", "data=points", "model=net", "task=ranked", *BRIEF, *words]
        try:
            return product(launch, home, chosen)
        except (Refusal, ValueError) as refused:
            return f"{type(refused).__name__}: {refused}"


def evaluate(launch: Launch, home: Path, *words: str) -> Any:
    with patch.object(sys, "path", [str(home), *sys.path]):
        return product(launch, home, ["--config-dir", "ranklab/conf", "job=evaluate", *words])


def figures(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in lines(run, "eval")]


SPREAD = {
    "ddp": (2, ["strategy=ddp", "loop.micro_batches=2", "loop.eval_batch=6"]),  # of the last one a rank has no sample
    "fsdp": (2, ["strategy=fsdp"]),
    "pp": (2, ["strategy=pp", "loop.micro_batches=2"]),
    "ddp_pp": (4, ["strategy=ddp_pp", "loop.micro_batches=2"]),
}


@pytest.mark.long
def test_the_area_under_the_curve_is_exact_on_any_number_of_ranks(processes: Processes, home: Path) -> None:
    average = ["ema.decay=0.5"]
    assert processes.run(1, train, home, f"run.dir={home / 'single'}", *average) == [0]
    alone = figures(home / "single")
    assert {"auc", "in_order", "accuracy", "ema_auc", "ema_in_order"} < set(alone[-1])
    assert alone[-1]["in_order"] != alone[-1]["ema_in_order"]
    for name, (size, words) in SPREAD.items():
        assert processes.run(size, train, home, f"run.dir={home / name}", *words, *average) == [0] * size
        for line, other in zip(figures(home / name), alone, strict=True):
            assert line == pytest.approx(other, abs=1e-9)
    # a trained run is evaluated again
    assert processes.run(2, evaluate, home, f"run.dir={home / 'single'}", "strategy=ddp") == [0, 0]
    again = lines(home / "single" / "evaluate", "eval")[-1]
    assert again["auc"] == pytest.approx(max(line["auc"] for line in alone), abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("added", r"Refusal: Task.metrics: scores_of_each has the shape (18,) in one micro-batch and (1,)"),
        ("kept", "Refusal: task: self.figures is a MetricCollection of torchmetrics, an object that remembers what"),
        ("wider", "ValueError: Wider.gathered: scores changes from micro-batch to micro-batch: (B, 17) and (B, 18)"),
        ("fewer", "ValueError: Fewer.gathered: scores is of shape (2,) for"),
        ("twice", "Refusal: Task.gathered: loss is the name of a sum already"),
        ("named", "Refusal: Task.metrics: loss is the name of a sum already"),
        ("stepped", "Refusal: Task.metrics: step is the name of something else in metrics.jsonl"),
    ],
)
def test_what_cannot_be_gathered_or_added_up_is_told(processes: Processes, home: Path, task: str, said: str) -> None:
    if task == "kept":
        pytest.importorskip("torchmetrics", reason="the extra bench brings it")
    run = home / f"{task}-run"
    words = [f"task={task}", f"run.dir={run}", "strategy=ddp", "loop.eval_batch=35"]
    for answer in processes.run(2, train, home, *words):
        assert answer.startswith(said)
    if task == "kept":
        assert not run.exists()  # before there was a group


def test_metrics_of_each_sample_are_refused_by_a_pipeline_too(processes: Processes, home: Path) -> None:
    words = ["task=added", f"run.dir={home / 'added-pp'}", "strategy=pp", "loop.micro_batches=2"]
    for answer in processes.run(2, train, home, *words):
        assert answer.startswith("Refusal: Task.metrics: scores_of_each has the shape (32,) in one")


def test_context_ranks_have_no_whole_outputs_to_keep(processes: Processes, home: Path) -> None:
    words = [f"run.dir={home / 'cp'}", "strategy=cp"]
    for answer in processes.run(2, train, home, *words):
        assert "Refusal" in answer
