"""Recomputing beside running statistics, and compiling beside both and beside other ranks: one curve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from recipes.vision.vit import MLP
from tests.run import far
from tests.strategies.networks import CLASSES, WIDTH
from tests.strategies.runs import SGD, Train, alike
from trainer import Plan

UNITS, OPERATORS = (f"strategy.activation_checkpointing={mode}" for mode in ("units", "operators"))


class Normed(nn.Sequential):
    """Units with batch statistics."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(3))
        super().__init__(*blocks, nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize("words", ["", "strategy.sync_bn=true strategy=ddp"])
def test_running_statistics_move_once_a_step_though_units_are_computed_again(train: Train, words: str) -> None:
    ranks, mode = (2, UNITS) if words else (1, OPERATORS)
    alike(train(f"{SGD} {words} {mode}", ranks, model=Normed), train(SGD, model=Normed))


class Dropped(MLP):
    """Draws."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Small(nn.Sequential):
    """What is cheap to compile: alike blocks of two layers, behind one, so that all their inputs want gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), *(Dropped(8) for _ in range(3)), nn.Linear(8, CLASSES))

    def plan(self) -> Plan:
        return Plan({"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}, shard=("[123]",))


# 12 rows in each micro-batch: what one compiles the others find in torch's cache
COMPILED = {
    "single": (1, "loop.micro_batches=2"),
    "ddp on 2": (2, f"strategy=ddp {UNITS}"),
    "tp on 2": (2, f"strategy=tp {OPERATORS} loop.micro_batches=2"),
    "fsdp on 2": (2, f"strategy=fsdp {UNITS}"),
}


@pytest.mark.long
@pytest.mark.parametrize("where", COMPILED)
def test_compiled_it_is_the_same_curve(train: Train, where: str) -> None:
    ranks, words = COMPILED[where]
    common = f"{SGD} precision=fp32 loop.steps=2 loop.global_batch=24"
    seen, alone = train(f"{common} {words} compile.mode=default", ranks, model=Small), train(common, model=Small)
    assert far(seen.losses, alone.losses) < 1e-5
    assert seen.tensors.keys() == alone.tensors.keys()  # names stay
    for name, value in seen.tensors.items():
        torch.testing.assert_close(value, alone.tensors[name], rtol=0, atol=1e-5)
    assert seen.figures["loss"] == pytest.approx(alone.figures["loss"], abs=1e-5)
