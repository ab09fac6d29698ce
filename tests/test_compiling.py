"""Compiling: how many graphs there are, and that they compute and draw what the network does without them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.options import options
from tests.run import Finished, quickly, run
from trainer import Plan

# torch silences it by replacing the function that shows warnings, which an error passes by
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Unit(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inside, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Attention(nn.Module):
    """With dropout in a kernel of torch, in a module of its own and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))  # (B, 2, T, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        return self.dropout(F.dropout(self.outer(attended.transpose(1, 2).flatten(2)), 0.3, self.training))


class Noisy(nn.Module):
    """Draws in several ways, and calls a part of itself that draws more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        if not self.training:
            return self.mlp(self.mlp(x))
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.8)  # whole samples, as stochastic depth drops them
        return self.mlp(self.mlp(x * kept)) + 0.1 * torch.empty_like(x).uniform_()


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "alike": lambda: [Unit(8, 8) for _ in range(10)],
    "each of its size": lambda: [Unit(8 + n, 9 + n) for n in range(10)],
    "noisy": lambda: [Noisy(), Noisy()],
}


class Tower(nn.Module):
    """Units of a kind behind a layer, and draws between them where they draw. Digits are read as (B, 8, 8)."""

    def __init__(self, kind: str = "alike") -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(KINDS[kind]()), 0.1 * (kind == "noisy")
        self.first, self.last = nn.Linear(8, 8), nn.Linear(18 if kind == "each of its size" else 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x.flatten(1).unflatten(1, (8, 8))), self.drop, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), self.drop, self.training)
        return self.last(x.mean(1))

    def plan(self) -> Plan:
        return Plan(shard=("blocks.*",))


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """Three steps of this network, and an evaluation; what Python keeps of graphs goes afterwards."""
    own = [*options(tmp_path, Tower), "model=tower", "loop.steps=3", "loop.log_every=1", "loop.global_batch=24"]
    own += ["loop.eval_batch=24", "precision=fp64", "strategy=single", "data=synthetic_images", "data.channels=1"]
    own += ["data.image_size=8", "data.evaluation_size=48", "data.size=96", "log=[console]"]

    def train(kind: str, name: str, *words: str) -> Finished:
        try:
            return run([*own, f"model.kind='{kind}'", f"run.dir={name}", *words], place=tmp_path)
        finally:
            torch.compiler.reset()

    return train


def losses(done: Finished) -> list[float]:
    return [line["loss"] for line in (*done.lines("train"), *done.lines("eval"))]


RECOMPUTED = "strategy.activation_checkpointing="
COUNTED: dict[str, tuple[str, list[str], list[str]]] = {
    "alike units share one": ("alike", [], ["1 graph", "1 more, 2 graphs in all"]),
    # more than torch would compile of one class
    "each has its own": ("each of its size", [], ["10 graphs", "10 more, 20 graphs in all"]),
    "the network is one": ("alike", ["compile.scope=network"], ["1 graph", "1 more, 2 graphs in all"]),
    "recomputed units": ("alike", [f"{RECOMPUTED}units"], ["1 graph", "1 more, 2 graphs in all"]),
    "recomputed operators": ("alike", [f"{RECOMPUTED}operators"], ["1 graph", "1 more, 2 graphs in all"]),
}


@pytest.mark.parametrize("case", quickly(COUNTED, "each has its own"))
def test_graphs_of_training_and_of_an_evaluation_are_counted_and_the_rehearsal_makes_none(
    train: Any, case: str
) -> None:
    """Graphs are run as they are: no compiler is called."""
    kind, words, counts = COUNTED[case]
    with patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        compiled = train(kind, "compiled", "compile.mode=default", *words)
    assert re.findall(r"compile: (.*), \d+ s until now", compiled.out) == counts
    plain = train(kind, "plain", *(word for word in words if not word.startswith("compile.")))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["compile.scope=units"],
        ["compile.scope=network", f"{RECOMPUTED}units"],
        ["compile.scope=units", f"{RECOMPUTED}operators"],
    ],
)
def test_compiled_each_sample_draws_what_it_draws_without(train: Any, words: list[str]) -> None:
    compiled = train("noisy", "compiled", "compile.mode=default", "loop.micro_batches=2", *words)
    assert losses(compiled) == pytest.approx(losses(train("noisy", "plain")), abs=1e-12)
