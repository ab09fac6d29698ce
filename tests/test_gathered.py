"""Figures that need every prediction: a task keeps something of each sample, and gets the whole set in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Processes
from tests.run import Finished, lines, quickly, run

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

class Fewer(Ranked):
    def gathered(self, output, target):
        return {"scores": output.mean(0)}

class Named(Ranked):
    def metrics(self, output, target):
        return {"loss": (output.argmax(1) == target).sum()}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("home")
    files = {"lab.py": LAB, "conf/model/net.yaml": "_target_: ranklab.lab.net\n"}
    files |= {"conf/data/points.yaml": "_target_: ranklab.lab.Points\n"}
    for name in ("Ranked", "Added", "Kept", "Fewer", "Named"):
        files[f"conf/task/{name.lower()}.yaml"] = f"_target_: ranklab.lab.{name}\n"
    for name, text in files.items():
        (place / "ranklab" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "ranklab" / name).write_text(text)
    return place


def train(home: Path, words: str, ranks: int = 1, code: int | None = 0) -> Finished:
    common = "precision=fp64 loop.steps=6 loop.global_batch=16 loop.eval_every=3 loader.workers=0 data=points model=net"
    parts = dict(word.split("=", 1) for word in f"{common} task=ranked {words}".split())
    how: Any = "here" if ranks == 1 else "group"
    chosen = ["--config-dir", "ranklab/conf", *(f"{key}={value}" for key, value in parts.items())]
    return run(chosen, ranks, how, place=home, code=code)


def figures(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in lines(folder, "eval")]


SPREAD = {
    "ddp": (2, "strategy=ddp loop.micro_batches=2 loop.eval_batch=6"),  # of the last one a rank has no sample
    "fsdp": (2, "strategy=fsdp"),
    "pp": (2, "strategy=pp loop.micro_batches=2"),
    "ddp_pp": (4, "strategy=ddp_pp loop.micro_batches=2"),
}
AVERAGE = "ema.decay=0.5"


@pytest.fixture(scope="module")
def alone(home: Path) -> list[dict[str, Any]]:
    return figures(train(home, f"run.dir=single {AVERAGE}").folder)


@pytest.mark.parametrize("name", quickly(SPREAD, "ddp"))
def test_the_area_under_the_curve_is_exact_on_any_number_of_ranks(
    processes: Processes, home: Path, alone: list[dict[str, Any]], name: str
) -> None:
    assert {"auc", "in_order", "accuracy", "ema_auc", "ema_in_order"} < set(alone[-1])
    assert alone[-1]["in_order"] != alone[-1]["ema_in_order"]
    ranks, words = SPREAD[name]
    for line, other in zip(figures(train(home, f"run.dir={name} {words} {AVERAGE}", ranks).folder), alone, strict=True):
        assert line == pytest.approx(other, abs=1e-9)


def test_a_trained_run_is_evaluated_again(processes: Processes, home: Path, alone: list[dict[str, Any]]) -> None:
    words = ["--config-dir", "ranklab/conf", "job=evaluate", "run.dir=single", "strategy=ddp"]
    run(words, 2, "group", place=home)
    again = lines(home / "single" / "evaluate", "eval")[-1]
    assert again["auc"] == pytest.approx(max(line["auc"] for line in alone), abs=1e-12)


SAID = {
    "added": r"Task.metrics: scores_of_each has the shape (18,) in one micro-batch and (1,)",
    "kept": "task: self.figures is a MetricCollection of torchmetrics, an object that remembers what",
    "fewer": "Fewer.gathered: scores is of shape (2,) for",
    "named": "Task.metrics: loss is the name of a sum already",
}


@pytest.mark.parametrize("task", quickly(SAID, "fewer", "named"))
def test_what_cannot_be_gathered_or_added_up_is_told(processes: Processes, home: Path, task: str) -> None:
    if task == "kept":
        pytest.importorskip("torchmetrics", reason="the extra bench brings it")
    ended = train(home, f"task={task} run.dir={task}-run strategy=ddp loop.eval_batch=35", 2, code=None)
    assert SAID[task] in ended.out
    assert ended.code == (1 if task == "fewer" else 2)
    assert task != "kept" or not ended.folder.exists()  # before there was a group


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task=added strategy=pp loop.micro_batches=2", "Task.metrics: scores_of_each has the shape (32,) in one"),
        ("strategy=cp", ""),  # context ranks have no whole outputs to keep
    ],
)
def test_a_pipeline_and_context_ranks_refuse_what_they_cannot_gather(
    processes: Processes, home: Path, words: str, said: str
) -> None:
    assert said in train(home, f"run.dir=refused {words}", 2, code=2).out
