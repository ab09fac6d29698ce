"""Cutting a network into stages: the same function, the same names, and refusals in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.vision.classification import Classification
from recipes.vision.cnn import CNN
from recipes.vision.mlp import MLP
from recipes.vision.resnet import resnet18, resnet50
from recipes.vision.vit import VisionTransformer
from tests.levels import Levels
from tests.strategies.toys import CLASSES, WIDTH, Blocks
from trainer.messages import Refusal
from trainer.parallel.meta_model import named_state
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.stages import RankStages
from trainer.strategies.loss import TaskNetwork


class Step(nn.Module):
    """What a strategy hands over: a network and how it is called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any, targets: Any) -> Any:
        return self.network(inputs["x"])


class Layers(nn.Module):
    """A mask of the input, a learned place, a buffer that is not stored, and a norm that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.place = nn.Parameter(torch.randn(6))
        self.unused = nn.LayerNorm(6)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("hidden", torch.full((6,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = (x > 0).to(x.dtype)
        y = self.second(self.first(x) + self.place) * seen
        return self.last(self.third(y) * self.scale) * self.scale * self.hidden * seen


class Chain(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*(layers or [nn.Linear(6, 6) for _ in range(4)]))


def run(stages: Sequence[nn.Module], inputs: Any) -> Any:
    """The stages one after the other, each with what the one before handed on."""
    handed: Any = ()
    for stage in stages:
        handed = stage(inputs, None, *handed)
    return handed


def cut(network: nn.Module, count: int, cuts: tuple[str, ...] = (), inputs: Any = None) -> Any:
    inputs = {"x": torch.randn(3, 6)} if inputs is None else inputs
    return list(cut_stages(Step(network), cuts, count, (inputs, torch.zeros(3))).values())


RECIPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: resnet18(10, 3, 16), (2, 3, 16, 16)),
    "resnet50": (lambda: resnet50(10, 3, 16), (2, 3, 16, 16)),
    "cnn": (lambda: CNN(10, 1, 28, width=8), (2, 1, 28, 28)),
    "mlp": (lambda: MLP(10, 1, 8, width=32), (2, 1, 8, 8)),
    "vit": (lambda: VisionTransformer(10, 1, 8, width=24), (2, 1, 8, 8)),
}


def test_a_u_net_is_refused_for_what_skips_a_cut() -> None:
    with pytest.raises(
        Refusal, match=r"begin\.weight is needed by stages 0 and 1: what is made with it passes .* by; str"
    ):
        cut(Levels(), 2, (), {"x": torch.randn(2, 1, 8, 8)})


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_cut_and_stays_the_same_function(recipe: str, count: int) -> None:
    make, shape = RECIPES[recipe]
    network, inputs = make().eval(), {"x": torch.randn(shape)}
    stages = cut(network, count, (), inputs)
    assert torch.equal(run(stages, inputs), network(inputs["x"]))
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(network.state_dict())  # each in one stage
    assert {name for stage in stages for name, _ in stage.named_modules() if name} <= {
        name for name, _ in network.named_modules()
    }
    parameters = {id(parameter) for stage in stages for parameter in stage.parameters()}
    assert parameters == {id(parameter) for parameter in network.parameters()}


def test_equal_parts_weigh_bytes_and_arithmetic() -> None:
    network = resnet18(10, 3, 16)
    stages = cut(network, 2, (), {"x": torch.randn(2, 3, 16, 16)})
    sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
    assert hasattr(stages[0], "layer3")  # by bytes alone the last block would weigh as much as all before it
    assert sizes[0] < sizes[1]
    narrow, wide = cut(Chain(*(nn.Linear(6, 6) for _ in range(8))), 2)
    assert len(narrow.state_dict()) == len(wide.state_dict())


def test_the_plans_cuts_are_followed() -> None:
    network = VisionTransformer(10, 1, 8, width=24)
    stages = cut(network, 3, ("blocks.1", "norm"), {"x": torch.randn(2, 1, 8, 8)})
    assert set(stages[0].state_dict()) == {
        name for name in network.state_dict() if name.startswith(("embed", "position", "blocks.0"))
    }
    assert set(stages[2].state_dict()) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert stages[1].get_submodule("blocks.2") is network.get_submodule("blocks.2")
    inner = cut(Chain(Chain(), Chain()), 2, ("1.2",))
    assert [len(stage.state_dict()) for stage in inner] == [12, 4]


def test_a_layer_that_writes_into_its_input_gets_a_copy_of_what_it_received() -> None:
    network = Chain(nn.Linear(6, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))
    second = cut(network, 2, ("1",))[1]
    received = torch.randn(2, 6, requires_grad=True)
    second({"x": torch.randn(2, 6)}, None, received)[0].sum().backward()  # "a leaf Variable" otherwise
    assert received.grad is not None


def test_nothing_is_computed_and_modes_stay() -> None:
    with torch.device("meta"):
        network = VisionTransformer(10, 1, 8, width=24, dropout=0.5)
    network.blocks[1].eval()
    stages = cut(network, 2, (), {"x": torch.randn(2, 1, 8, 8)})
    assert all(tensor.is_meta for stage in stages for _, tensor in named_state(stage))
    assert not network.blocks[1].training
    assert network.blocks[0].training
    stages[0].eval()
    assert not network.blocks[0].training  # a stage's modules are the network's own


def test_stages_of_one_rank_are_one_module_with_the_networks_names() -> None:
    network = Layers()
    stages = cut(network, 4, ("second", "third", "last"))
    held = RankStages([stages[0], stages[2]], [name for name, _ in network.named_modules()])
    names = ["place", "first.weight", "first.bias", "unused.weight", "unused.bias", "third.weight", "third.bias"]
    assert sorted(name for name, _ in held.named_parameters()) == sorted(names)
    assert set(held.state_dict()) == {*names, "scale"}
    assert held.get_submodule("third") is network.third
    with pytest.raises(AttributeError, match="second"):
        held.get_submodule("second")
    held.load_state_dict({name: torch.zeros_like(value) for name, value in held.state_dict().items()})
    assert not network.third.weight.any()
    held.load_state_dict({**held.state_dict(), "second.bias": torch.zeros(6)})  # which another rank holds
    with pytest.raises(RuntimeError, match=r"third\.bias"):
        held.load_state_dict({name: value for name, value in held.state_dict().items() if name != "third.bias"})
    held.eval()
    assert not network.third.training
    assert network.second.training


class ParallelModel(Chain):
    """Places and a mask that follow from the length of the batch, as a transformer makes them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(3)))
        self.places = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        size, _ = x.size()
        x = x + self.places(torch.arange(0, size, dtype=torch.long, device=x.device))
        mask = torch.triu(torch.full((size, size), -1.0, device=x.device), 1)
        for at in range(3):
            x = mask @ self[at](x)
        return x


def test_what_follows_from_the_length_of_a_batch_is_made_by_every_stage() -> None:
    network = ParallelModel()
    stages = cut(network, 2)
    for size in (3, 5):
        inputs = {"x": torch.randn(size, 6)}
        assert torch.equal(run(stages, inputs), network(inputs["x"]))


class Holder(nn.Module):
    """A network of one's own around somebody else's."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole, self.last = whole, nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.whole(x))


class Otherwise(Blocks):
    """The same network, put to work in another way."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def guided(net: Any, x: Tensor) -> Tensor:
    hidden = net.begin(x)
    mask = torch.softmax(net.spare.weight.sum() * torch.ones(len(x[0]), len(x[0])), -1)
    for block in net.blocks:
        hidden, _ = block(hidden, mask=mask)
    return net.end(hidden)


@pytest.mark.parametrize(
    ("make", "count", "cuts"),
    [
        (Blocks, 2, ()),
        (Blocks, 4, ()),
        (lambda: Holder(Blocks()), 3, ()),
        (Blocks, 3, ("blocks.1", "head")),
        (lambda: Otherwise(guided), 3, ()),  # several values go from block to block
    ],
)
def test_the_networks_own_code_is_run_by_every_stage(
    make: Callable[[], nn.Module], count: int, cuts: tuple[str, ...]
) -> None:
    network, inputs = make(), {"x": torch.randn(3, WIDTH)}
    stages = cut(network, count, cuts, inputs)
    expected = gradients(network, lambda: network(inputs["x"]))
    assert gradients(network, lambda: run(stages, inputs)) == expected
    for size in (3, 5, 3):  # other values, another size, without gradients
        inputs = {"x": torch.randn(size, WIDTH)}
        with torch.no_grad():
            assert torch.equal(run(stages, inputs), network(inputs["x"]))
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


def gradients(network: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """What a forward gives the parameters of a network; their gradients are gone afterwards."""
    network.zero_grad()
    forward().square().sum().backward()
    return {name: one.grad.tolist() for name, one in network.named_parameters() if one.grad is not None}


def skipping(net: Any, x: Tensor) -> Tensor:
    first = net.begin(x)
    return net.end(net.through(first, x) + first)


def around(net: Any, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = net.blocks[2].norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    hidden = net.through(net.begin(x), x)
    handle.remove()
    return net.end(hidden + kept[0])


def listing(net: Any, x: Tensor) -> Tensor:
    return net.end(net.blocks[0](net.begin(x), mask=[net.spare.weight])[0])


def deciding(net: Any, x: Tensor) -> Tensor:
    hidden = net.begin(x)
    return net.end(net.through(hidden if hidden.sum() > 0 else -hidden, x))


def chancing(net: Any, x: Tensor) -> Tensor:
    return net.end(net.through(net.begin(x * (torch.rand(len(x), 1) > 0.1)), x))


def writing(net: Any, x: Tensor) -> Tensor:
    return net.end(net.through(net.begin(x.mul_(2)), x))


def freezing(net: Any, x: Tensor) -> Tensor:
    net.embed.requires_grad_(False)
    y = net.end(net.through(net.begin(x), x))
    net.embed.requires_grad_(True)
    return y


def replacing(net: Any, x: Tensor) -> Tensor:
    hidden, mask = net.begin(x), torch.ones(x.shape[1], x.shape[1])
    for block in net.blocks:
        weights = {name: 0.5 * weight for name, weight in block.named_parameters()}
        hidden, _ = torch.func.functional_call(block, weights, (hidden,), {"mask": mask})
    return net.end(hidden)


def tied() -> nn.Module:
    network = Blocks()
    network.blocks[3].norm = network.norm
    network.blocks[0].norm = network.norm
    return network


UNCUT: dict[str, tuple[nn.Module, tuple[str, ...], str]] = {
    "is tied": (
        tied(),
        (),
        r"blocks\.0\.norm\.weight.* and norm\.weight are one parameter, .* 0 and 1 need: .*tie_word",
    ),
    "skips": (Otherwise(skipping), (), r"is needed by stages 0 and 1: what is made with it passes blocks\.2 by"),
    "skips a stage": (
        Otherwise(around),
        ("blocks.2", "blocks.3"),
        r"stage 2 needs what blocks\.2 is given, which passe",
    ),
    "is guided by a list": (Otherwise(listing), ("blocks.0",), r"blocks\.0 is given values inside of others"),
    "detaches": (
        Otherwise(lambda n, x: n.end(n.through(n.begin(x).detach(), x))),
        ("blocks.0",),
        "is given nothing that gradients go",
    ),
    "runs twice": (
        Otherwise(lambda n, x: n.end(n.through(n.through(n.begin(x), x), x))),
        ("blocks.2",),
        r"blocks\.2 .* a second time",
    ),
    "stands still": (
        Otherwise(lambda n, x: n.end(n.begin(x))),
        ("blocks.2",),
        r"blocks\.2 is never called by the forward",
    ),
    "is out of order": (Blocks(), ("head", "blocks.1"), r"blocks\.1 is called .* before another cut"),
    "decides": (Otherwise(deciding), (), "cannot be run without the values of its weights .DataDependent"),
    "takes chances": (Otherwise(chancing), (), "draws random numbers by itself"),
    "writes": (Otherwise(writing), (), "changes the batch in place"),
    "replaces weights": (Otherwise(replacing), (), r"blocks\.2 is called with other parameters than its own"),
    "freezes": (Otherwise(freezing), (), "freezes parameters for a while"),
    "has nothing there": (
        Otherwise(lambda n, x: n.end(n.blocks[0].dropout(n.begin(x)))),
        ("blocks.0.dropout", "norm"),
        "stage 1 of 3 would have no parameter",
    ),
}


@pytest.mark.parametrize("case", UNCUT)
def test_what_is_run_and_cannot_be_cut_is_refused_in_words(case: str) -> None:
    network, cuts, words = UNCUT[case]
    with pytest.raises(Refusal, match=words):
        cut(network, len(cuts) + 1 if cuts else 2, cuts, {"x": torch.randn(3, WIDTH)})
    assert all(parameter.requires_grad for parameter in network.parameters())


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
def test_what_passes_a_cut_without_a_gradient_is_no_silent_nonsense(way: Callable[..., Tensor], where: str) -> None:
    inputs = {"x": torch.randn(3, WIDTH)}
    stages = cut(Otherwise(way), 2, (), inputs)
    with pytest.raises(RuntimeError, match=f"{where}.* what only an earlier stage knows"):
        run(stages, inputs)


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self[3].weight = self[0].weight


def frozen() -> nn.Module:
    network = Chain()
    network[0].requires_grad_(False)
    return network


REFUSED = {
    "no such module": (Chain(), 2, ("4",), r"the plan's cut '4' matches no module"),
    "never called": (Blocks(), 2, ("blocks",), "blocks is never called by the forward; strategy=fsdp"),
    "out of order": (Chain(), 3, ("2", "1"), "1 is called a second time, or before another cut that stands before it"),
    "too many": (Chain(), 5, (), "has parts for 4 stages, 5 were asked for; with 4 it would work, or a plan with cuts"),
    "one layer": (Chain(nn.Linear(6, 6)), 2, (), "has parts for 1 stage, 2 were asked for; strategy=fsdp"),
    "tied": (Tied(), 2, (), r"0\.weight and 3\.weight are one parameter, which stages 0 and 1 need"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_in_words(case: str) -> None:
    network, count, cuts, words = REFUSED[case]
    learning = [parameter.requires_grad for parameter in network.parameters()]
    with pytest.raises(Refusal, match=words):
        cut(network, count, cuts, {"x": torch.randn(3, WIDTH)} if isinstance(network, Blocks) else None)
    assert [parameter.requires_grad for parameter in network.parameters()] == learning


def test_equal_parts_go_around_frozen_ones() -> None:
    first, second = cut(frozen(), 2)
    assert any(parameter.requires_grad for parameter in first.parameters())
    assert any(parameter.requires_grad for parameter in second.parameters())


class Views(Classification):
    """An evaluation averages an image and its mirror image."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        return network(inputs) if network.training else (network(inputs) + network(inputs.flip(-1))) / 2


def test_an_evaluation_of_several_views_is_refused() -> None:
    """Stages run once: the second view would have had the first one's scores."""
    network, example = resnet18(3, 3, 32), (torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))
    with pytest.raises(Refusal, match=r"is called 2 times in an evaluation, and a stage runs once"):
        cut_stages(TaskNetwork(Views(), network), (), 2, example)
