"""Networks of which one rank builds the values, and the others hold an outline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer

from recipes.vision.resnet import resnet18
from tests.options import options
from tests.ranks import Processes
from tests.run import run
from tests.test_initial_weights import STILL, saved
from trainer import Refusal
from trainer.parallel.meta_model import build_meta_model, is_meta_model


class Odd(nn.Module):
    """A network whose constructor does what a function says."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__()
        build(self)


def attribute(network: Any) -> None:
    network.table = torch.ones(3)


def value(network: Any) -> None:
    network.linear = nn.Linear(3, 3)
    network.deviation = network.linear.weight.std().item()


def old_norm(network: Any) -> None:
    """Weights that a hook computes before each forward need no values."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        network.linear = torch.nn.utils.weight_norm(nn.Linear(3, 4))


def refuses(network: Any) -> None:
    raise Refusal("no such width")


@pytest.mark.parametrize(("build", "said"), [(attribute, "neither"), (value, "item")])
def test_a_constructor_that_needs_values_gets_them_and_the_reason_is_said(build: Any, said: str) -> None:
    network, why = build_meta_model(partial(Odd, build))
    assert not is_meta_model(network)
    assert said in why


SWIN: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": [2, 2]}


@pytest.mark.parametrize(
    "make",
    [
        partial(resnet18, 10, 1, 28),
        partial(SwinTransformer, **SWIN),  # its buffers are views, which keep what they are views of
        partial(nn.LSTM, 8, 8, 2),
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
        partial(Odd, old_norm),
    ],
)
def test_others_have_an_outline(make: Callable[[], nn.Module]) -> None:
    network, why = build_meta_model(make)
    assert (is_meta_model(network), why) == (True, "")
    assert network.state_dict().keys() == make().state_dict().keys()
    with pytest.raises(Refusal, match="no such width"):  # which stays one
        build_meta_model(partial(Odd, refuses))


BUILT: list[bool] = []  # had the weights of this rank values, as its network was built? Once for each time


class Everything(nn.Module):
    """Values of all kinds: drawn, computed, tied, frozen, and some that no checkpoint holds."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 24), nn.Linear(24, 64), nn.LayerNorm(64)
        self.again, self.head = nn.Linear(24, 64), nn.Linear(64, 10)
        self.head.weight.requires_grad_(False)
        self.again.weight = self.down.weight
        self.register_buffer("order", torch.randperm(7))
        self.register_buffer("table", torch.linspace(0, 1, 64) + torch.rand(64), persistent=False)
        self.convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        if reads:
            self.deviation = self.up.weight.std().item()
        BUILT.append(not self.up.weight.is_meta)

    def forward(self, x: Tensor) -> Tensor:
        x, y = x.flatten(1), self.convolution(x).mean((1, 2, 3))
        hidden = torch.tanh(self.up(x))
        return self.head(self.norm(x + self.down(hidden) + self.again(hidden) + self.table)) + y[:, None]


def forget(launch: Any) -> list[bool]:
    """What the constructor was asked for since the last call."""
    seen = [*BUILT]
    BUILT.clear()
    return seen


SPREAD: list[tuple[int, list[str]]] = [
    (3, ["strategy=fsdp", "strategy.sync_bn=true"]),
    (2, ["strategy=ddp", "strategy.sync_bn=true"]),
    (2, ["strategy=fsdp", "strategy.sync_bn=true", "strategy.cpu_offload=true", "precision=fp64", "model.reads=true"]),
    (2, ["strategy=tp"]),
]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "words"), SPREAD, ids=str)
def test_each_rank_gets_its_part_of_every_value_that_one_has_built(
    processes: Processes, tmp_path: Path, ranks: int, words: list[str]
) -> None:
    own = [*options(tmp_path, Everything), "model=everything", "loop.steps=1", "loop.global_batch=12", *STILL]
    own += ["loop.eval_every=null", "loop.log_every=1", "seed=5"]
    more = [word for word in words[1:] if not word.startswith("strategy.")]
    alone = run([*own, *more, "strategy=single", "run.dir=alone"], place=tmp_path)
    processes.run(ranks, forget)
    spread = run([*own, *words, "run.dir=spread"], ranks, "group", place=tmp_path)
    built = processes.run(ranks, forget)
    if "strategy=fsdp" in words and "model.reads=true" not in words:
        # only the main rank's network ever had values
        assert [any(one) for one in built] == [True] + [False] * (ranks - 1)
    # what no checkpoint holds shows in the loss
    assert spread.curve() == pytest.approx(alone.curve(), rel=1e-5)
    wanted, found = saved(alone.folder), saved(spread.folder)
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(found[name], one), name
