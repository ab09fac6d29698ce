"""The loop: when a run writes lines, evaluates and saves, what stands there, and what a task hears of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.options import options
from tests.run import Finished, run
from trainer import Data, Task

BATCH, CLASSES = 48, 4  # an epoch has 4 whole batches of 220 samples
SEEN: list[Any] = []
NOW = [0.0]


class Rows(Data):
    def __init__(self, evaluated: int = 101) -> None:
        self.evaluated = evaluated

    def rows(self, size: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 12, generator=generator)
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def train(self) -> Any:
        return self.rows(220, 1)

    def evaluation(self) -> Any:
        return self.rows(self.evaluated, 2)


class Net(nn.Module):
    """`normed`: by the statistics of each batch alone, of which one sample has none."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(12, 24), nn.Linear(24, CLASSES)
        self.norm = nn.BatchNorm1d(24, track_running_stats=False) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(x)).relu())


class Watched(Task):
    """Notes what it hears; its steps take 2 seconds and its evaluations 30, by the clock `NOW`."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        SEEN.append(network.training)
        NOW[0] += 2.0 if network.training else 30.0
        return network(inputs)

    def loss(self, output: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"correct": (output.argmax(1) == target).sum()}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, Any]:
        return {"right": totals["correct"] / totals["samples"]}  # a tensor, and not the loss

    def after_step(self, network: nn.Module, step: int) -> None:
        assert not torch.is_grad_enabled()  # what it changes in place is not learned through
        SEEN.append(step)


class Weightless(Watched):
    """No sample counts."""

    def weight(self, target: Tensor) -> Tensor:
        return torch.tensor(0.0)


class Broken(Watched):
    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        raise KeyError("a mistake in the metrics")


class Squeezes(Watched):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output[:, :1].squeeze(), target.float())


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """Runs of these classes; what evaluates has three batches, the last of one sample."""
    own = [*options(tmp_path, Rows, Net, Watched, Weightless, Broken, Squeezes), "data=rows", "model=net"]
    own += ["task=watched", f"loop.global_batch={BATCH}", "loop.eval_batch=50", "schedule=constant"]

    def train(name: str, *words: str, code: int = 0) -> Finished:
        SEEN.clear()
        return run([*own, f"run.dir={name}", *words], place=tmp_path, code=code)

    return train


def saved(folder: Path) -> dict[int, Any]:
    """What the manifests of a run's checkpoints say, by their steps."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    return {int(path.name[5:]): json.loads((path / "manifest.json").read_text()) for path in paths}


def at(finished: Finished, kind: str) -> list[tuple[int, int]]:
    return [(line["step"], line["epoch"]) for line in finished.lines(kind)]


def test_lines_evaluations_and_saves_come_when_they_are_due_and_after_the_last_step(train: Any) -> None:
    words = ["loop.log_every=[4,6]", "loop.eval_every=1ep", "loop.save_every=[5,8]", "checkpoint.keep=9"]
    done = train("run", *words, "loop.steps=10", "checkpoint.best=right")
    assert at(done, "train") == [(4, 0), (6, 1), (8, 1), (10, 2)]
    assert at(done, "eval") == [(4, 0), (8, 1), (10, 2)]
    assert all(line["samples"] == 101 for line in done.lines("eval"))
    # what was just evaluated stands beside what is saved
    figures = {line["step"]: line for line in done.lines("eval")}
    for step, manifest in saved(done.folder).items():
        wanted = {key: value for key, value in figures.get(step, {}).items() if key in ("loss", "right")}
        assert {key: manifest["figures"][key] for key in wanted} == wanted, step
        assert bool(manifest["figures"]) == (step in figures)
    assert {5, 8, 10} <= saved(done.folder).keys()
    # every step is heard of, by a network in its mode; before the first an evaluation and a step are tried
    epoch = [False] * 3
    tail = SEEN[-(2 * 10 + 3 * 3) :]
    assert tail == [one for step in range(1, 11) for one in (True, step, *(epoch if step in (4, 8, 10) else []))]


def test_a_training_line_says_what_it_should_and_its_mean_is_of_the_steps_since_the_last(train: Any) -> None:
    words = ["loop.steps=10", "loop.eval_every=null", "precision=fp32"]
    with patch("trainer.loop.train_metrics.perf_counter", lambda: NOW[0]):
        each, rarely = (train(str(n), *words, f"loop.log_every={n}", "loop.eval_every=4") for n in (1, 4))
    keys = "kind step epoch loss loss_mean loss_hex lr grad_norm samples samples_per_s step_s time sample_digest"
    for line in [*each.lines("train"), *rarely.lines("train")]:
        assert set(line) == set(keys.split())
        assert struct.unpack(">f", bytes.fromhex(line["loss_hex"])) == (line["loss"],)
        assert line["samples"] == line["step"] * BATCH
        assert (line["step_s"], line["samples_per_s"]) == (2.0, BATCH / 2.0)  # whatever evaluations take
    losses = each.curve()
    lines = rarely.lines("train")
    assert [line["loss"] for line in lines] == [losses[3], losses[7], losses[9]]
    means = [sum(part) / len(part) for part in (losses[:4], losses[4:8], losses[8:])]
    assert [line["loss_mean"] for line in lines] == pytest.approx(means, rel=1e-12)
    # the mean loss stands in an evaluation, whatever the task's figures are
    assert set(each.lines("eval")[0]) == {"kind", "step", "epoch", "samples", "loss", "right"}
    assert [line["loss"] for line in train("none", *words, "loop.eval_every=4", "task=weightless").lines("eval")] == [
        0.0
    ] * 3


def test_a_new_best_is_kept_at_once(train: Any) -> None:
    done = train("run", "loop.steps=12", "loop.save_every=null", "checkpoint.keep=1", "checkpoint.best=right")
    best = max(done.lines("eval"), key=lambda line: (line["right"], -line["loss"]))
    assert set(saved(done.folder)) == {best["step"], 12}


def test_a_run_that_is_stopped_goes_on_to_the_bit_and_a_clock_makes_things_due(train: Any) -> None:
    words = ["loop.steps=7", "loop.log_every=1", "loop.eval_every=3"]
    whole = train("whole", *words)
    stopped = train("parts", *words, "run.stop_after=0.000001", code=75)
    assert (stopped.status["state"], list(saved(stopped.folder))) == ("preempted", [1])
    parts = train("parts", *words, "loop.save_every=0.000001s", "checkpoint.keep=9")
    assert set(saved(parts.folder)) == set(range(1, 8))
    for kind in ("train", "eval"):
        untimed = [
            [{key: line[key] for key in line if key not in ("time", "step_s", "samples_per_s")} for line in lines]
            for lines in (whole.lines(kind), parts.lines(kind))
        ]
        # the mean of a line that came after a start is of the steps since then
        assert untimed[0] == untimed[1]


def test_a_place_from_which_no_whole_batch_is_left_goes_on_with_the_next_epoch(train: Any) -> None:
    train("run", "loop.steps=3")  # 144 of 220 samples
    done = train("run", "loop.steps=5", "loop.global_batch=100", "loop.log_every=1", "run.accept_changes=true")
    assert at(done, "train")[-2:] == [(4, 1), (5, 1)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["task=broken"], 1, "a mistake in the metrics"),
        (["task=squeezes", "loop.eval_batch=100"], 1, "This was a trial with a batch of 1 sample, "),
        (["model.normed=true"], 2, "norm is a BatchNorm"),
    ],
)
def test_a_fault_of_an_evaluation_shows_before_the_first_step(
    train: Any, words: list[str], code: int, said: str
) -> None:
    done = train("run", *words, "loop.steps=2", code=code)
    assert said in done.out
    assert done.lines("train") == []
    assert not [one for one in SEEN if type(one) is int]


class Strict(Watched):
    """From its second step on whatever waits for a GPU is an error."""

    def after_step(self, network: nn.Module, step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if step in (2, 3, 4) else "default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("more", [[], ["loop.on_nonfinite=skip", "loop.micro_batches=2"]])
def test_nothing_in_a_step_waits_for_the_gpu(train: Any, tmp_path: Path, more: list[str]) -> None:
    options(tmp_path, Strict)
    train("run", "task=strict", "device=cuda", "loop.steps=6", "loop.log_every=100", "loop.max_norm=1", *more)
