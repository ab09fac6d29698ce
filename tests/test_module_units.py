"""Which subtrees are units: what a plan names, and what is found where it is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recipes.vision.cnn import CNN
from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from trainer import Plan, Refusal
from trainer.parallel.module_units import find_units


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Tower(nn.Module):
    """An embedding, blocks that repeat, a head that may use the embedding's weight."""

    def __init__(self, depth: int = 3, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(width * width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width * width, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_the_plan_decides_and_wildcards_stand_within_one_level() -> None:
    for keys, found in (
        (("blocks.*",), BLOCKS),
        (("head", "blocks.[02]"), ["blocks.0", "blocks.2", "head"]),  # in the network's order
        (("blocks.*.one",), [f"{block}.one" for block in BLOCKS]),
        (("blocks.[!1]",), ["blocks.0", "blocks.2"]),
    ):
        assert find_units(Tower(), Plan(shard=keys)) == found
    # a wildcard leaves out what has no parameters
    assert find_units(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), Plan(shard=("*",))) == ["0", "2"]


@pytest.mark.parametrize(
    ("network", "keys", "said"),
    [
        (Tower(), ("block.*",), ["'block.*' matches no module", "did you mean 'blocks"]),
        (Tower(), ("blocks",), ["blocks, a ModuleList, which is never called", "use 'blocks.*'"]),
        (Tower(), ("blocks.*", "blocks.1.two"), ["names blocks.1 and blocks.1.two inside it"]),
        (Tower(tied=True), ("head",), ["head, of whose parameters one is also used outside"]),
        (Block(), ("drop",), ["'drop' names only modules without parameters"]),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), ("0.out_proj",), ["MultiheadAttention uses weights in it"]),
    ],
)
def test_what_cannot_be_a_unit_is_refused_in_words(network: nn.Module, keys: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        find_units(network, Plan(shard=keys))
    assert all(part in str(refused.value) for part in said), str(refused.value)


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "blocks that repeat": (Tower, ["embed", *BLOCKS, "head"]),
    "tied: the embedding's weight is the head's, too": (lambda: Tower(tied=True), BLOCKS),
    "vit": (lambda: VisionTransformer(10, 1, 28), [f"blocks.{index}" for index in range(6)]),
    "cnn": (lambda: CNN(10, 1, 28), [*(f"features.{index}" for index in range(5)), "classifier"]),
    "resnet": (
        lambda: resnet18(10, 3, 32),
        [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)],
    ),
    "torch's transformer": (
        lambda: nn.Transformer(16, 2, 2, 1, 32, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_where_it_is_silent_blocks_that_repeat_are_found_else_parts_by_size(case: str) -> None:
    make, found = FOUND[case]
    with torch.device("meta"):  # only sizes are looked at
        network = make()
    assert find_units(network, Plan()) == found
    # they are disjoint
    held = [id(parameter) for name in found for parameter in network.get_submodule(name).parameters()]
    assert len(held) == len(set(held))
