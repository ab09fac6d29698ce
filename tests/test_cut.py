"""Cutting a network into stages: the same function, the same names, and refusals in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from tests.run import quickly
from tests.strategies.networks import WIDTH, Blocks
from trainer import Refusal
from trainer.parallel.pipeline.cut import cut_stages


class Step(nn.Module):
    """What a strategy hands over: a network and how it is called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any, targets: Any) -> Any:
        return self.network(inputs["x"])


class Put(Blocks):
    """The same layers, put to work in some other way."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def run(stages: Sequence[nn.Module], inputs: Any) -> Any:
    """The stages one after the other, each with what the one before handed on."""
    handed: Any = ()
    for stage in stages:
        handed = stage(inputs, None, *handed)
    return handed


def cut(network: nn.Module, count: int, cuts: tuple[str, ...] = (), x: Tensor | None = None) -> Any:
    example = {"x": torch.randn(3, WIDTH) if x is None else x}
    return list(cut_stages(Step(network), cuts, count, (example, torch.zeros(3))).values())


def gradients(network: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """What a forward gives the parameters of a network; their gradients are gone afterwards."""
    network.zero_grad()
    forward().square().sum().backward()
    return {name: one.grad.tolist() for name, one in network.named_parameters() if one.grad is not None}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4)))


IMAGE = (2, 1, 8, 8)
SAME: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...], tuple[int, ...]]] = {
    "blocks": (Blocks, 4, (), (3, WIDTH)),
    "where the plan says": (Blocks, 3, ("blocks.1", "head"), (3, WIDTH)),
    "in place": (mlp, 2, ("1",), (3, WIDTH)),
    "vit": (lambda: VisionTransformer(10, 1, 8, width=24), 3, ("blocks.1", "norm"), IMAGE),
    "resnet18": (lambda: resnet18(10, 1, 8), 4, (), IMAGE),
}


@pytest.mark.parametrize("case", quickly(SAME, "blocks", "in place", "vit"))
def test_stages_are_the_same_function_of_the_networks_own_parts_and_names(case: str) -> None:
    make, count, cuts, shape = SAME[case]
    network, inputs = make(), {"x": torch.randn(shape)}
    stages = cut(network, count, cuts, inputs["x"])
    if shape != (3, WIDTH):
        network.eval()  # batch statistics
    assert gradients(network, lambda: run(stages, inputs)) == gradients(network, lambda: network(inputs["x"]))
    for size in (3, 5, 3):  # other values, another size, without gradients
        inputs = {"x": torch.randn(size, *shape[1:])}
        with torch.no_grad():
            assert torch.equal(run(stages, inputs), network(inputs["x"]))
    for stage, first in zip(stages[1:], cuts, strict=False):
        assert stage.get_submodule(first) is network.get_submodule(first)
    own = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(own) == sorted(name for name, _ in network.named_parameters())  # each in one stage
    assert {name for stage in stages for name in stage.state_dict()} == set(network.state_dict())
    assert {id(one) for stage in stages for one in stage.parameters()} == {id(one) for one in network.parameters()}
    here = {
        name: module
        for stage in stages
        for name, module in stage.named_modules()
        if name and type(module) is not nn.Module
    }
    for mode in (False, True):  # the network's own train() has the last word
        wanted = {name: module.training for name, module in network.train(mode).named_modules() if name in here}
        for stage in stages:
            stage.train(not mode).train(mode)
        assert {name: module.training for name, module in here.items()} == wanted


def test_equal_parts_weigh_bytes_and_arithmetic_and_go_around_frozen_ones() -> None:
    stages = cut(resnet18(10, 3, 16), 2, (), torch.randn(2, 3, 16, 16))
    sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
    assert hasattr(stages[0], "layer3")  # by bytes alone the last block would weigh as much as all before it
    assert sizes[0] < sizes[1]
    narrow, wide = cut(chain(8), 2)
    assert len(narrow.state_dict()) == len(wide.state_dict())
    frozen: Any = chain(4)
    frozen[0].requires_grad_(False)
    assert all(any(parameter.requires_grad for parameter in stage.parameters()) for stage in cut(frozen, 2))


def test_nothing_is_computed_by_cutting() -> None:
    with torch.device("meta"):
        network = VisionTransformer(10, 1, 8, width=24, dropout=0.5)
    stages = cut(network, 2, (), torch.randn(IMAGE))
    assert all(one.is_meta for stage in stages for one in (*stage.parameters(), *stage.buffers()))


def skipping(net: Any, x: Tensor) -> Tensor:
    first = net.begin(x)
    return net.end(net.through(first, x) + first)


def deciding(net: Any, x: Tensor) -> Tensor:
    hidden = net.begin(x)
    return net.end(net.through(hidden if hidden.sum() > 0 else -hidden, x))


def tied() -> nn.Module:
    network = Blocks()
    network.blocks[3].norm = network.blocks[0].norm = network.norm
    return network


def chain(count: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


Way = Callable[[Any, Tensor], Tensor]
UNCUT: dict[str, tuple[Callable[[], nn.Module] | Way, int, tuple[str, ...], str]] = {
    "no such module": (chain, 2, ("4",), r"the plan's cut '4' matches no module"),
    "too many": (chain, 5, (), "has parts for 4 stages, 5 were asked for; with 4 it would work, or a plan with cuts"),
    "tied": (tied, 2, (), r"blocks\.0\.norm\.weight.* and norm\.weight are one parameter, .* 0 and 1 need: .*tie_word"),
    "skips": (skipping, 2, (), r"is needed by stages 0 and 1: what is made with it passes blocks\.2 by"),
    "runs twice": (
        lambda n, x: n.end(n.through(n.through(n.begin(x), x), x)),
        2,
        ("blocks.2",),
        r"blocks\.2 .* a second time",
    ),
    "stands still": (lambda n, x: n.end(n.begin(x)), 2, ("blocks.2",), r"blocks\.2 is never called by the forward"),
    "decides": (deciding, 2, (), "cannot be run without the values of its weights .DataDependent"),
    "takes chances": (
        lambda n, x: n.end(n.through(n.begin(x * (torch.rand(len(x), 1) > 0.1)), x)),
        2,
        (),
        "draws random numbers by itself",
    ),
    "writes": (lambda n, x: n.end(n.through(n.begin(x.mul_(2)), x)), 2, (), "changes the batch in place"),
}


@pytest.mark.parametrize("case", UNCUT)
def test_what_cannot_be_cut_is_refused_in_words(case: str) -> None:
    what, count, cuts, words = UNCUT[case]
    is_way = what.__code__.co_argcount == 2 if hasattr(what, "__code__") else False
    network: Any = Put(what) if is_way else what()  # type: ignore[arg-type, call-arg]
    with pytest.raises(Refusal, match=words):
        cut(network, count, cuts)
    assert all(parameter.requires_grad for parameter in network.parameters())
