"""Figures of a run are those that the task's own numbers give, whatever their size and precision."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.options import options
from tests.run import Finished, run
from trainer import Task
from trainer.strategies.machine import Machine

SWITCHES: list[tuple[bool, bool]] = []  # of torch, as losses were computed


class Light(Task):
    """Every sample weighs `each`; `far` is added to each loss."""

    def __init__(self, each: float = 1.0, far: float = 0.0) -> None:
        self.each, self.far = each, far

    def loss(self, output: Tensor, target: Tensor) -> Any:
        SWITCHES.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        with torch.backends.cudnn.flags(enabled=True):  # fails where the flags contradict each other
            pass
        return functional.cross_entropy(output, target) + self.far

    def weight(self, target: Tensor) -> Tensor:
        return torch.tensor(self.each * len(target))

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"right": self.each * (output.argmax(1) == target).sum()}


class Coarse(Task):
    """A loss, a weight and a figure in bf16."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = output.logsumexp(1).mean()
        assert loss.dtype == torch.bfloat16
        return loss

    def weight(self, target: Tensor) -> Tensor:
        return torch.tensor(len(target), dtype=torch.bfloat16)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"size": output.logsumexp(1).mean() * self.weight(target)}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Finished]:
    own = [*options(tmp_path, Light, Coarse), "model=mlp", "model.width=16", "model.depth=1", "loop.global_batch=24"]

    def train(name: str, *words: str) -> Finished:
        return run([*own, "schedule=constant", f"run.dir={name}", *words], place=tmp_path)

    return train


def test_weights_that_are_small_in_sum_shrink_nothing(train: Any) -> None:
    words = ["task=light", "loop.steps=5", "loop.log_every=1", "loop.micro_batches=2"]
    one, other = (train(each, *words, f"task.each={each}") for each in ("1.0", "0.001"))
    for key in ("loss", "grad_norm"):
        assert other.curve(key) == pytest.approx(one.curve(key), rel=1e-5)
    for key in ("loss", "right"):
        assert other.lines("eval")[-1][key] == pytest.approx(one.lines("eval")[-1][key], rel=1e-4)


def test_in_fp64_the_bits_of_the_loss_are_those_of_fp64(train: Any) -> None:
    words = ["task=light", "task.far=1e300", "precision=fp64", "loop.steps=1", "optimizer.lr=0", "loop.max_norm=null"]
    (line,) = train("far", *words).lines("train")
    assert line["loss"] == pytest.approx(1e300)  # one of fp32 ends at 3.4e38
    assert struct.unpack(">d", bytes.fromhex(line["loss_hex"])) == (line["loss"],)


def test_fp32_is_fp32_unless_asked_otherwise(train: Any) -> None:
    for word in (True, False):
        SWITCHES.clear()
        train("run", "task=light", "loop.steps=1", f"tf32={word}", "run.resume=fresh")
        assert {*SWITCHES} == {(word, word)}


def test_losses_of_few_bits_are_added_up_exactly(train: Any) -> None:
    words = ["task=coarse", "precision=bf16", "loop.steps=80", "loop.micro_batches=2", "loop.eval_batch=8"]
    each = train("each", *words, "loop.log_every=1", "optimizer.lr=1e-5")
    mean = train("mean", *words, "loop.log_every=null", "optimizer.lr=1e-5")
    (line,) = mean.lines("train")
    assert line["loss_mean"] == pytest.approx(sum(each.curve()) / 80, rel=1e-9)
    # the mean of two losses of 8 bits is one of 9 or more
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in each.curve())
    figures = mean.lines("eval")[-1]
    assert figures["size"] == pytest.approx(figures["loss"], rel=1e-3)
    assert figures["loss"] == pytest.approx(line["loss"], rel=0.1)


@pytest.mark.gpu
def test_on_a_gpu_convolutions_and_products_have_the_bits_of_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    image, weight = torch.randn(8, 64, 16, 16, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)

    def furthest(tf32: bool) -> float:
        device = Machine(device="cuda", precision="fp32", tf32=tf32).claim_device()
        seen = functional.conv2d(image.to(device), weight.to(device)).cpu()
        seen_product = (weight.flatten(1).to(device) @ weight.flatten(1).T.to(device)).cpu()
        exact = functional.conv2d(image.double(), weight.double())
        exact_product = weight.flatten(1).double() @ weight.flatten(1).T.double()
        return max(float((seen - exact).abs().max()), float((seen_product - exact_product).abs().max()))

    assert furthest(tf32=False) < 1e-3
    if torch.cuda.get_device_capability() >= (8, 0):
        assert furthest(tf32=True) > 1e-3
    Machine(device="cuda").claim_device()  # as it was
