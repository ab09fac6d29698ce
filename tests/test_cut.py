"""Cutting a network into stages: the same function, the same names, and refusals in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from trainer import Refusal
from trainer.parallel.pipeline.cut import cut_stages

WIDTH, CLASSES = 12, 4


class Step(nn.Module):
    """What a strategy hands over: a network and how it is called; `views`: an evaluation looks twice."""

    def __init__(self, network: nn.Module, views: bool = False) -> None:
        super().__init__()
        self.network, self.views = network, views

    def forward(self, inputs: Any, targets: Any) -> Any:
        if self.views and not self.network.training:
            return (self.network(inputs["x"]) + self.network(inputs["x"].flip(-1))) / 2
        return self.network(inputs["x"])


class Chain(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*(layers or [nn.Linear(6, 6) for _ in range(4)]))


class Block(nn.Module):
    """What a transformer repeats, but for its attention: a mask says who sees whom."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.dropout(self.down(F.gelu(self.up(mask @ self.norm(hidden))))), mask


class Blocks(nn.Module):
    """A network as people write it: a len(), a type that is asked for, a train() of its own; `way`: put to work so."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed, self.place, self.way = nn.Linear(1, 8), nn.Parameter(torch.linspace(-1, 1, 8)), way
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.spare = nn.Linear(3, 3)  # nobody calls it

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.blocks[-1].eval()  # as those do that keep a part frozen
        return self

    def begin(self, x: Tensor) -> Tensor:
        """(B, WIDTH) to (B, WIDTH, 8)."""
        return self.embed(x[..., None]) + self.place

    def through(self, hidden: Tensor, x: Tensor) -> Tensor:
        size = len(hidden[0])
        # (B, WIDTH, WIDTH), of every batch another
        mask = hidden.new_ones(size, size).tril() * (x > -1)[:, None] / size
        for block in self.blocks:
            hidden, mask = block(hidden, mask=mask) if isinstance(hidden, Tensor) else (hidden, mask)
        return hidden

    def end(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden[:, -1] * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x) if self.way else self.end(self.through(self.begin(x), x))


class ByLength(Chain):
    """Places and a mask that follow from the length of the batch, as a transformer makes them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.places = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size, _ = x.size()
        x = x + self.places(torch.arange(0, size, dtype=torch.long, device=x.device))
        mask = torch.triu(torch.full((size, size), -1.0, device=x.device), 1)
        for at in range(3):
            x = mask @ self[at](x)
        return x


def run(stages: Sequence[nn.Module], inputs: Any) -> Any:
    """The stages one after the other, each with what the one before handed on."""
    handed: Any = ()
    for stage in stages:
        handed = stage(inputs, None, *handed)
    return handed


def cut(network: nn.Module, count: int, cuts: tuple[str, ...] = (), x: Tensor | None = None, **how: Any) -> Any:
    example = {"x": torch.randn(3, WIDTH) if x is None else x}
    return list(cut_stages(Step(network, **how), cuts, count, (example, torch.zeros(3))).values())


def gradients(network: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """What a forward gives the parameters of a network; their gradients are gone afterwards."""
    network.zero_grad()
    forward().square().sum().backward()
    return {name: one.grad.tolist() for name, one in network.named_parameters() if one.grad is not None}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4)))


def frozen() -> nn.Module:
    network = Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    network[0].requires_grad_(False)
    return network


IMAGE = (2, 1, 8, 8)
SAME: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...], tuple[int, ...]]] = {
    "blocks": (Blocks, 2, (), (3, WIDTH)),
    "blocks, each": (Blocks, 4, (), (3, WIDTH)),
    "where the plan says": (Blocks, 3, ("blocks.1", "head"), (3, WIDTH)),
    "by the length": (ByLength, 2, (), (3, WIDTH)),
    "in place": (mlp, 2, ("1",), (3, WIDTH)),
    "vit": (lambda: VisionTransformer(10, 1, 8, width=24), 3, ("blocks.1", "norm"), IMAGE),
    "resnet18": (lambda: resnet18(10, 1, 8), 4, (), IMAGE),
}


@pytest.mark.parametrize("case", SAME)
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
    narrow, wide = cut(Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))), 2)
    assert len(narrow.state_dict()) == len(wide.state_dict())
    assert all(any(parameter.requires_grad for parameter in stage.parameters()) for stage in cut(frozen(), 2))


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
    return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


Way = Callable[[Any, Tensor], Tensor]
UNCUT: dict[str, tuple[Callable[[], nn.Module] | Way, int, tuple[str, ...], str]] = {
    "no such module": (chain, 2, ("4",), r"the plan's cut '4' matches no module"),
    "out of order": (Blocks, 3, ("head", "blocks.1"), r"blocks\.1 is called .* before another cut"),
    "too many": (chain, 5, (), "has parts for 4 stages, 5 were asked for; with 4 it would work, or a plan with cuts"),
    "one layer": (lambda: chain(1), 2, (), "has parts for 1 stage, 2 were asked for; strategy=fsdp"),
    "tied": (tied, 2, (), r"blocks\.0\.norm\.weight.* and norm\.weight are one parameter, .* 0 and 1 need: .*tie_word"),
    "skips": (skipping, 2, (), r"is needed by stages 0 and 1: what is made with it passes blocks\.2 by"),
    "detaches": (
        lambda n, x: n.end(n.through(n.begin(x).detach(), x)),
        2,
        ("blocks.0",),
        "is given nothing that gradients go",
    ),
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
    network: Any = Blocks(what) if is_way else what()  # type: ignore[arg-type, call-arg]
    with pytest.raises(Refusal, match=words):
        cut(network, count, cuts)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_an_evaluation_of_several_views_is_refused() -> None:
    """Stages run once: the second view would have had the first one's scores."""
    with pytest.raises(Refusal, match=r"is called 2 times in an evaluation, and a stage runs once"):
        cut(Blocks(), 2, views=True)


def recalling(net: Any, x: Tensor) -> Tensor:
    first = net.begin(x)
    return net.end(net.through(first, x) + first.detach())


def masking(net: Any, x: Tensor) -> Tensor:
    hidden = net.begin(x)
    mask = torch.softmax(hidden.detach() @ hidden.detach().mT, -1)
    for block in net.blocks:
        hidden, _ = block(hidden, mask=mask)
    return net.end(hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless warnings are errors
@pytest.mark.parametrize(("way", "where"), [(recalling, "a stage hands on"), (masking, "blocks.2 is given")])
def test_what_passes_a_cut_without_a_gradient_is_no_silent_nonsense(way: Way, where: str) -> None:
    inputs = {"x": torch.randn(3, WIDTH)}
    stages = cut(Blocks(way), 2, (), inputs["x"])
    with pytest.raises(RuntimeError, match=f"{where}.* what only an earlier stage knows"):
        run(stages, inputs)
