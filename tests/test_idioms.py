"""What people write in a network and expect to hold: the values are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.run import curve, lines, quickly, run

LAB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Data, Task


class Numbers(Data):
    def train(self):
        return TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) // 16)

    def evaluation(self):
        return self.train()


class Merging(nn.Linear):  # eval() adds what was learned to the frozen weight, train() takes it away
    merged = False

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.more = nn.Parameter(torch.zeros(4, 4))
        nn.init.eye_(self.weight.requires_grad_(False))

    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += -self.more if mode else self.more
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + nn.functional.linear(x, self.more)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0), nn.Dropout(0.5)]
        self.student, self.teacher = Merging(), nn.Sequential(*layers).eval().requires_grad_(False)
        nn.init.zeros_(self.teacher[0].weight)
        nn.init.ones_(self.teacher[0].bias)

    def forward(self, x):
        return self.student(x) - self.teacher(x)


class Halved(nn.Module):  # weights of 8 bits, as published ones often are
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        return self.layer(x.bfloat16()) - 1


class Spare(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self[0].requires_grad_(False)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self[1](self[0](x))


class Asked(Task):  # the mean over the samples that are asked, as cross_entropy(ignore_index=…) takes it
    def __init__(self, counts):
        self.counts = counts

    def loss(self, output, asked):
        return output[asked > 0].square().mean()

    def weight(self, asked):
        return asked.sum() if self.counts else len(asked)


class Squares(Task):
    def loss(self, output, target):
        return output.float().square().mean()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it."""
    place = tmp_path_factory.mktemp("idioms")
    for key in ("data/numbers", "model/student", "model/halved", "model/spare", "task/squares", "task/asked"):
        path = place / "idioms" / "conf" / f"{key}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"_target_: idioms.lab.{path.stem.capitalize()}\n" + "counts: true\n" * (path.stem == "asked"))
    (place / "idioms" / "lab.py").write_text(LAB)
    return place


WORDS = ["--config-dir", "idioms/conf", "data=numbers", "task=squares", "optimizer=sgd", "schedule=constant"]
WORDS += ["optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0", "loop.global_batch=32"]


def numbers() -> Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


RANKS = {"single": 1, "ddp": 2, "zero1": 2, "fsdp": 2}


def trained(place: Path, folder: Path, *words: str, ranks: int = 1) -> Path:
    run([*WORDS, "loop.log_every=1", f"run.dir={folder}", *words], ranks, "group" if ranks > 1 else "here", place=place)
    return folder


def tensors(folder: Path, step: int | None = None) -> dict[str, Tensor]:
    """All that a checkpoint holds, of the last step if none is named, as its files have it."""
    found = sorted((folder / "checkpoints").glob("step-*" if step is None else f"step-{step:08d}"))[-1]
    parts: dict[str, list[Tensor]] = {}
    for file in sorted(found.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(several) if len(several) > 1 else several[0] for name, several in parts.items()}


@pytest.mark.parametrize("strategy", quickly(RANKS, "single", "fsdp"))
def test_an_evaluation_merges_nothing_that_is_saved_and_a_frozen_teacher_sleeps(
    place: Path, tmp_path: Path, processes: object, strategy: str
) -> None:
    words = ["model=student", "loop.steps=4", "loop.eval_every=2", "ema.decay=0.5", "optimizer.lr=0.3"]
    words += [f"strategy={strategy}"]
    folder = trained(place, tmp_path / "run", *words, ranks=RANKS[strategy])
    x, more, average, figures = numbers(), torch.zeros(4, 4), torch.zeros(4, 4), []
    for step in range(4):
        figures.append(float((x @ more.T + x - 1).square().mean()))
        more = more - 0.3 * 2 * (x @ more.T + x - 1).T @ x / x.numel()
        average = average.lerp(more, 0.5) if step else more
    assert curve(folder) == pytest.approx(figures, rel=1e-5)
    last = lines(folder, "eval")[-1]
    for name, one in (("loss", more), ("ema_loss", average)):
        assert last[name] == pytest.approx(float((x @ one.T + x - 1).square().mean()), rel=1e-5)
    left = tensors(folder)
    torch.testing.assert_close(left["student.weight"], torch.eye(4))
    torch.testing.assert_close(left["student.more"], more)


@pytest.mark.parametrize("strategy", quickly(RANKS, "single", "fsdp"))
def test_the_average_of_bf16_weights_has_the_bits_of_fp32(
    place: Path, tmp_path: Path, processes: object, strategy: str
) -> None:
    words = ("model=halved", f"strategy={strategy}", "loop.eval_every=4", "loop.save_every=1", "checkpoint.keep=99")
    for steps in (4, 8):  # the second command goes on
        more = (f"loop.steps={steps}", "ema.decay=0.99", "optimizer.lr=0.1")
        folder = trained(place, tmp_path / "run", *words, *more, ranks=RANKS[strategy])
    average = tensors(folder, 1)["layer.weight"].float()
    for step in range(2, 9):
        average = average.lerp(tensors(folder, step)["layer.weight"].float(), 0.01)
    torch.testing.assert_close(tensors(folder, 8)["ema/layer.weight"], average)
    assert lines(folder, "eval")[-1]["ema_loss"] != lines(folder, "eval")[-2]["ema_loss"]
    assert "layer.weight: learned in bf16 or fp16" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("strategy", quickly(RANKS, "single", "zero1"))
def test_parameters_without_a_gradient_are_named_once(
    place: Path, tmp_path: Path, processes: object, strategy: str
) -> None:
    words = ["model=spare", f"strategy={strategy}", "loop.steps=3", "checkpoint.whole=true"]
    words += ["strategy.find_unused_parameters=true"] * (strategy == "ddp")
    folder = trained(place, tmp_path / "run", *words, ranks=RANKS[strategy])
    said = (folder / "logs" / "rank-0.log").read_text()
    assert said.count("no gradient in the first step: spare.weight, spare.bias; if they are meant to learn") == 1


def test_what_counts_for_nothing_breaks_no_figure_and_a_mean_over_nothing_is_named(place: Path, tmp_path: Path) -> None:
    words = ["model=spare", "task=asked", "loop.steps=1"]
    figures = [
        lines(trained(place, tmp_path / str(size), *words, f"loop.eval_batch={size}"), "eval")[0]["loss"]
        for size in (4, 32)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    folder = trained(place, tmp_path / "plain", *words, "loop.eval_batch=4", "task.counts=false")
    said = (folder / "logs" / "rank-0.log").read_text()
    assert "evaluation: loss nan, from loss of samples 0, 1, 2, 3. Is it a mean over nothing?" in said
    command = [*WORDS, *words, "loop.micro_batches=16", f"run.dir={tmp_path / 'broken'}"]
    assert "of weight 0: micro-batch" in run(command, place=place, code=1).out


def test_a_warm_up_counts_epochs_too_and_a_long_one_is_said(place: Path, tmp_path: Path) -> None:
    words = ["model=spare", "loop.global_batch=16", "loop.steps=10", "optimizer.lr=1"]
    folder = trained(place, tmp_path / "run", *words, "schedule=constant", "schedule.warmup=2ep")  # of two steps
    assert curve(folder, "lr") == [0.25, 0.5, 0.75, *[1.0] * 7]
    assert "schedule.warmup is 4 of 10 steps, 40% of the run" in (folder / "logs" / "rank-0.log").read_text()
