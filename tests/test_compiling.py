"""Compiling by units: how many graphs there are; what they compute, tests/strategies/test_order.py shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.commands import SMALL
from tests.inside import product
from trainer.launch.rendezvous import Launch
from trainer.learning.parallel_plan import Plan
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing
from trainer.parallel.compile import Compiler, CompileSettings, without_compile
from trainer.parallel.rng.kernels import install_kernels, uninstall_kernels
from trainer.parallel.rng.sample_rng import make_rng

# torch silences it by replacing the function that shows warnings, which an error passes by
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to (B, width + 1)."""
        return nn.functional.pad(self.inner(x).tanh(), (0, 1))


class Alike(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Graphs(Compiler):
    """Its graphs run as they are: no compiler is called."""

    def __init__(self) -> None:
        super().__init__(CompileSettings(), make_rng("sample", 0, torch.device("cpu")))
        self.made: list[Any] = []

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Any, below: Any = None) -> Callable[..., Any]:
        self.made.append(graph)
        return graph.forward


@pytest.fixture
def compiler() -> Iterator[Graphs]:
    config = torch.compiler.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    yield Graphs()
    config.recompile_limit, config.accumulated_recompile_limit = limits
    torch.compiler.reset()


def names(network: nn.Module) -> list[str]:
    return [name for name, _ in network.named_children() if name != "0"]


def test_alike_units_share_a_graph(compiler: Graphs) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Alike(4) for _ in range(12)))
    plain = network(torch.ones(3, 4))
    compiler.compile_units(network, names(network), recomputed=False)
    assert torch.equal(network(torch.ones(3, 4)), plain)
    assert len(compiler.made) == 1
    network(torch.ones(5, 4))
    network(torch.ones(7, 4))
    assert len(compiler.made) == 2  # one for any other size


@pytest.mark.long
def test_more_units_of_one_class_than_torch_would_compile_are_compiled_each_by_its_sizes(compiler: Graphs) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Block(4 + index) for index in range(12)))
    compiler.compile_units(network, names(network), recomputed=False)
    network(torch.ones(3, 4))
    assert len(compiler.made) == 12
    sizes = [tuple(node.meta["example_value"].shape) for node in _inputs(compiler.made[-1])]
    assert (3, 15) in sizes  # numbers, no symbols for what could vary


def _inputs(graph: Any) -> Iterator[Any]:
    return (node for node in graph.graph.nodes if node.op == "placeholder" and "example_value" in node.meta)


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # torch 2.11 looks into no forward of its own
        for block in self:
            x = block(x)
        return x


def test_without_units_the_network_is_one_graph_under_its_own_names(compiler: Graphs) -> None:
    network = Chain(nn.Linear(4, 4), *(Block(4 + index) for index in range(3)))
    before = list(network.state_dict())
    compiler.compile_units(network, [], recomputed=False)
    network(torch.ones(3, 4))
    assert len(compiler.made) == 1
    assert list(network.state_dict()) == before


@pytest.mark.parametrize("mode", ["units", "operators"])
def test_recomputed_units_share_a_graph_too_with_what_is_recomputed_in_it(compiler: Graphs, mode: Any) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Alike(4) for _ in range(3)))
    apply_activation_checkpointing(network, names(network), mode)
    compiler.compile_units(network, names(network), recomputed=False)
    network(torch.ones(3, 4)).sum().backward()
    assert len(compiler.made) == 1
    assert "checkpoint" in compiler.made[0].code
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_rehearsal_compiles_nothing(compiler: Graphs) -> None:
    network = nn.Sequential(nn.Linear(4, 4), Alike(4))
    compiler.compile_units(network, ["1"], recomputed=False)
    with without_compile():
        network(torch.ones(2, 4)).sum().backward()
    assert not compiler.made
    network(torch.ones(3, 4))
    network(torch.ones(3, 4))
    assert len(compiler.made) == 1


class Attention(nn.Module):
    """With dropout in a kernel of torch, in a module of its own and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        parts = self.inner(x).chunk(3, -1)
        q, k, v = (part.reshape(*part.shape[:-1], 2, 4).transpose(1, 2) for part in parts)  # (B, 2, T, 4)
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


# torch 2.11 changes the order of draws in branches of a graph: there the run refuses to compile what draws
ORDERED = pytest.mark.skipif(torch.__version__ < "2.13", reason="the order of draws in a graph: torch 2.13 or newer")


class Rare(Noisy):
    """Draws by rarer functions, and where branches of a graph do not wait for each other."""

    def forward(self, x: Tensor) -> Tensor:
        branches = F.alpha_dropout(x, 0.1, self.training), F.gumbel_softmax(x), F.dropout(x.sin(), 0.3)
        return super().forward(branches[0] * branches[2]) + branches[1] + 0.1 * torch.rand(x.shape, dtype=x.dtype)


class Chained(nn.Module):
    """Blocks of one kind, one of them called twice, and draws between them."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList([kind(), kind()]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        for block in (*self.blocks, self.blocks[0]):
            x = F.dropout(block(x), 0.1, self.training)
        return self.last(x)


def curve(kind: type[nn.Module], compiled: str, mode: Any = "none") -> list[float]:
    """Losses of three steps of two micro-batches, and of evaluations after them."""
    torch.manual_seed(0)
    network = Chained(kind).double()
    rng, units = make_rng("sample", 7, torch.device("cpu")), ["blocks.0", "blocks.1"]
    rng.watch(network, Plan(shard=tuple(units)))
    install_kernels(torch.device("cpu"), "sample", compiled=True)
    if mode != "none":
        apply_activation_checkpointing(network, units, mode)
    if compiled:
        compiler = Compiler(CompileSettings(), rng)
        compiler.compile_units(network, units if compiled == "units" else [], mode != "none")
    optimizer, losses = torch.optim.SGD(network.parameters(), 0.1), []
    for step in range(3):
        x, indices = (
            torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(step)).double(),
            torch.arange(6) + step,
        )
        for part in (0, 1):
            rows = slice(3 * part, 3 * part + 3)
            rng.begin_forward(indices[rows], step, part, 0)
            with rng:
                loss = network(x[rows]).square().mean()
                loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        rng.begin_evaluation(indices)
        with rng, torch.no_grad():
            losses.append(float(network.eval()(x).square().mean()))
        network.train()
    torch.compiler.reset()
    uninstall_kernels("sample")
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "compiled", "mode"),
    [
        (Noisy, "units", "none"),
        (Noisy, "network", "none"),
        (Noisy, "units", "units"),
        (Noisy, "units", "operators"),
        (Noisy, "network", "units"),
        pytest.param(Rare, "units", "none", marks=ORDERED),
        pytest.param(Rare, "network", "none", marks=ORDERED),
    ],
)
def test_compiled_each_sample_draws_what_it_draws_without(kind: type[nn.Module], compiled: str, mode: Any) -> None:
    assert curve(kind, compiled, mode) == pytest.approx(curve(kind, ""), abs=1e-12)


class Recurrent(nn.Module):
    """Its graph ends where torch's recurrent layers begin, and goes on inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        return self.inner(x)[0]


def test_recurrent_layers_learn_the_same_beside_graphs() -> None:
    assert curve(Recurrent, "units") == pytest.approx(curve(Recurrent, ""), rel=1e-12)


def test_graphs_of_training_and_of_an_evaluation_are_counted_in_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "compile.mode=default", "loop.micro_batches=1", "log=[console]", "run.dir=run"]
    with patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        assert product(Launch(), tmp_path, words) == 0
    torch.compiler.reset()
    counted = re.findall(r"compile: (.*), \d+ s until now", capsys.readouterr().out)
    assert counted == ["1 graph", "1 more, 2 graphs in all"]
