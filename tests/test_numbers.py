"""Figures of a run are those that the task's own numbers give, whatever their size and precision."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.commands import curve, lines
from tests.inside import product
from trainer import Task
from trainer.launch.rendezvous import Launch
from trainer.records.resume_rules import find_changes, select_learning_changes
from trainer.strategies.loss import accumulate_losses
from trainer.strategies.machine import Machine


class Light(Task):
    """Every sample weighs `each`."""

    def __init__(self, each: float) -> None:
        self.each = each

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

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


class Far(Light):
    """Losses of about 1e300."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) + 1e300


BRIEF = ["trust=[tests]", "model=mlp", "model.width=16", "model.depth=1", "loop.global_batch=24", "schedule=constant"]


def train(place: Path, name: str, *words: str) -> None:
    for option, values in {"light": "each: 1.0\n", "far": "each: 1.0\n", "coarse": ""}.items():
        path = place / "conf" / "task" / f"{option}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"_target_: tests.test_numbers.{option.title()}\n{values}")
    assert product(Launch(), place, ["--config-dir", "conf", *BRIEF, f"run.dir={name}", *words]) == 0


def test_weights_that_are_small_in_sum_shrink_nothing(tmp_path: Path) -> None:
    for each in ("1", "0.001"):
        run = ["task=light", f"task.each={each}", "loop.steps=5", "loop.log_every=1", "loop.micro_batches=2"]
        train(tmp_path, each, *run)
    for key in ("loss", "grad_norm"):
        assert curve(tmp_path / "0.001", key) == pytest.approx(curve(tmp_path / "1", key), rel=1e-5)
    one, other = (lines(tmp_path / name, "eval")[-1] for name in ("1", "0.001"))
    for key in ("loss", "right"):
        assert other[key] == pytest.approx(one[key], rel=1e-4)


def test_in_fp64_the_bits_of_the_loss_are_those_of_fp64(tmp_path: Path) -> None:
    train(tmp_path, "far", "task=far", "precision=fp64", "loop.steps=1", "optimizer.lr=0", "loop.max_norm=null")
    (line,) = lines(tmp_path / "far", "train")
    assert line["loss"] == pytest.approx(1e300)  # one of fp32 ends at 3.4e38
    assert struct.unpack(">d", bytes.fromhex(line["loss_hex"])) == (line["loss"],)


def test_fp32_is_fp32_unless_asked_otherwise(tmp_path: Path) -> None:
    for word in ("true", "false"):
        train(tmp_path, f"tf32-{word}", "loop.steps=1", f"tf32={word}")
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is (word == "true")
        with torch.backends.cudnn.flags(enabled=True):  # fails where the flags contradict each other
            pass
    assert select_learning_changes(find_changes({"tf32": False}, {"tf32": True}))


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


def test_losses_of_few_bits_are_added_up_exactly(tmp_path: Path) -> None:
    sums: dict[str, Tensor] = {}
    for loss in (1.0, 0.0078125, 1.0):  # in bf16 the second is lost beside the first
        accumulate_losses(sums, {"loss": torch.tensor(loss, dtype=torch.bfloat16)}, 0.25)
    assert float(sums["loss"]) == 0.501953125
    run = ["task=coarse", "precision=bf16", "loop.steps=80", "loop.micro_batches=2", "loop.eval_batch=8"]
    train(tmp_path, "each", *run, "loop.log_every=1", "optimizer.lr=1e-5")
    train(tmp_path, "mean", *run, "loop.log_every=null", "optimizer.lr=1e-5")
    (line,) = lines(tmp_path / "mean", "train")
    assert line["loss_mean"] == pytest.approx(sum(curve(tmp_path / "each")) / 80, rel=1e-9)
    figures = lines(tmp_path / "mean", "eval")[-1]
    assert figures["size"] == pytest.approx(figures["loss"], rel=1e-3)
    assert figures["loss"] == pytest.approx(line["loss"], rel=0.1)
