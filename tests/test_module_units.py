"""Which subtrees are units: what a plan names, and what is found where it is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from recipes.vision.cnn import CNN
from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from tests.strategies.toys import BatchNormNet, Net, SequenceNet
from trainer import Plan
from trainer.messages import Refusal
from trainer.parallel.module_units import find_units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

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


class Learned(nn.Module):
    """Holds a parameter of its own beside its modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.position)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def named(*keys: str) -> Plan:
    return Plan(shard=keys)


def test_the_plan_decides_and_wildcards_stand_within_one_level() -> None:
    assert find_units(Tower(), named("blocks.*")) == BLOCKS
    assert find_units(Tower(), named("head", "blocks.[02]")) == [
        "blocks.0",
        "blocks.2",
        "head",
    ]  # in the network's order
    assert find_units(Tower(), named("blocks.*.one")) == [f"{block}.one" for block in BLOCKS]


def test_a_wildcard_leaves_out_what_has_no_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    assert find_units(network, named("*")) == ["0", "2"]


@pytest.mark.parametrize(
    ("network", "plan", "said"),
    [
        (Tower(), named("block.*"), ["'block.*' matches no module", "did you mean 'blocks"]),
        (Tower(), named("blocks"), ["blocks, a ModuleList, which is never called", "use 'blocks.*'"]),
        (Tower(), named("blocks.*", "blocks.1.two"), ["names blocks.1 and blocks.1.two inside it"]),
        (Tower(tied=True), named("head"), ["head, of whose parameters one is also used outside"]),
        (Net(), named("dropout"), ["'dropout' names only modules without parameters"]),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), named("0.out_proj"), ["MultiheadAttention uses weights in it"]),
    ],
)
def test_what_cannot_be_a_unit_is_refused_in_words(network: nn.Module, plan: Plan, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        find_units(network, plan)
    assert all(part in str(refused.value) for part in said), str(refused.value)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Tower, ["embed", *BLOCKS, "head"]),
        (lambda: Tower(tied=True), BLOCKS),  # the embedding's weight is the head's, too
        (lambda: VisionTransformer(10, 1, 28), [f"blocks.{index}" for index in range(6)]),
        (lambda: CNN(10, 1, 28), [*(f"features.{index}" for index in range(5)), "classifier"]),
        (
            lambda: resnet18(10, 3, 32),
            [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)],
        ),
        (
            lambda: nn.Transformer(16, 2, 2, 1, 32, batch_first=True),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
        ),
        (lambda: nn.MultiheadAttention(8, 2), []),
        (lambda: nn.Linear(8, 8), []),
        (nn.GELU, []),
    ],
)
def test_where_it_is_silent_blocks_that_repeat_are_found_else_parts_by_size(
    make: Callable[[], nn.Module], found: list[str]
) -> None:
    with torch.device("meta"):  # only sizes are looked at
        assert find_units(make(), Plan()) == found


def test_the_largest_parts_are_taken_apart_until_they_are_small() -> None:
    stage = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
    network = nn.ModuleDict({"large": Learned(stage), "crumb": nn.LayerNorm(2)})
    assert find_units(network, Plan()) == ["large.inner.0", "large.inner.1"]  # the position and the crumb stay outside


def test_what_owns_parameters_is_opened_only_for_blocks() -> None:
    whole = nn.ModuleDict({"part": Learned(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))})
    assert find_units(whole, Plan()) == ["part"]
    scales = Block(8)
    scales.scales = nn.ParameterList([torch.zeros(8)])
    assert find_units(nn.ModuleDict({"part": scales}), Plan()) == ["part"]


def test_a_reparametrised_layer_stays_in_one_piece() -> None:
    network = nn.Sequential(weight_norm(nn.Linear(8, 8, bias=False)), weight_norm(nn.Linear(8, 8)))
    assert find_units(network, Plan()) == ["0", "1"]


def test_a_module_used_twice_is_no_unit() -> None:
    shared = Block(8)
    network = nn.ModuleDict({"one": shared, "two": nn.Sequential(shared, nn.Linear(8, 8)), "three": Block(8)})
    assert find_units(network, Plan()) == ["two.1", "three"]


@pytest.mark.parametrize("network", [Net(), BatchNormNet(), SequenceNet(), Tower(12), resnet18(10, 3, 32)])
def test_units_are_disjoint_called_and_few(network: nn.Module) -> None:
    names = find_units(network, Plan())
    assert 1 <= len(names) <= 16
    assert not any(one != other and one.startswith(f"{other}.") for one in names for other in names)
    held = [id(parameter) for name in names for parameter in network.get_submodule(name).parameters()]
    assert len(held) == len(set(held)) > 0
