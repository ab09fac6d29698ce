"""Compiling by units: how many graphs there are; what they compute, tests/strategies/test_order.py shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

from tests.commands import SMALL
from tests.inside import product
from trainer.launch.rendezvous import Launch
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing
from trainer.parallel.compile import Compiler, CompileSettings, without_compile
from trainer.parallel.rng.compiled_rng import CompiledSampleRNG, make_rng

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
        super().__init__(CompileSettings(), CompiledSampleRNG.modes)
        self.made: list[Any] = []

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
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


class Rare(Noisy):
    """Draws by functions that end a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.alpha_dropout(x, 0.1, self.training)) + F.gumbel_softmax(x)


# the graphs as Inductor would get them
@patch("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
def curve(kind: type[nn.Module], compiled: str, mode: Any = "none") -> list[float]:
    """Losses of three steps of two micro-batches, and of evaluations after them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 4)).double()
    rng = make_rng("sample", bool(compiled), 7, torch.device("cpu"))
    rng.watch(network, may_draw=False)
    if mode != "none":
        apply_activation_checkpointing(network, ["1", "2"], mode)
    if compiled:
        compiler = Compiler(CompileSettings(), CompiledSampleRNG.modes)
        compiler.compile_units(network, ["1", "2"] if compiled == "units" else [], mode != "none")
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
        (Rare, "units", "none"),
    ],
)
def test_compiled_each_sample_draws_what_it_draws_without(kind: type[nn.Module], compiled: str, mode: Any) -> None:
    assert curve(kind, compiled, mode) == pytest.approx(curve(kind, ""), abs=1e-12)


class Random(nn.Module):
    """Draws by a function without a tensor among its arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.rand(x.shape, dtype=x.dtype)


def test_torch_rand_gives_samples_their_numbers_or_is_refused() -> None:
    is_hidden = torch.__version__.startswith("2.11")
    how = pytest.raises(RuntimeError, match=r"write torch\.empty_like\(x\)\.uniform_") if is_hidden else nullcontext()
    with how:
        assert curve(Random, "units") == pytest.approx(curve(Random, ""), abs=1e-12)


class Recurrent(nn.Module):
    """Its graph ends where torch's recurrent layers begin, and goes on inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        return self.inner(x)[0]


def test_recurrent_layers_learn_the_same_beside_graphs() -> None:
    assert curve(Recurrent, "network") == pytest.approx(curve(Recurrent, ""), rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("compiled", ["units", "network"])
def test_what_a_graph_that_ends_would_draw_again_otherwise_is_an_error(compiled: str) -> None:
    with pytest.raises(Exception, match=r"(?s)disable|graph.?break"):  # torch's, with the line
        curve(Rare, compiled, "units")


def test_what_changes_from_step_to_step_is_not_taken_to_lie_where_it_is() -> None:
    """Or torch would record CUDA graphs anew in every step, which took ten times as long as none on an H200."""
    static: dict[tuple[int, ...], bool] = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        static.update(
            {tuple(x.shape): hasattr(x, "_dynamo_static_input_type") for x in inputs if isinstance(x, Tensor)}
        )
        return graph.forward

    class Dropped(nn.Sequential):  # with code of its own: torch 2.11 leaves modules of torch as they are
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    network, device = Dropped(nn.Linear(4, 6), nn.Dropout(0.5)), torch.device("cpu")
    rng = make_rng("sample", True, 0, device)
    rng.watch(network, False)
    network.compile(backend=backend)
    rng.begin_forward(torch.arange(5), 0, 0, 0)
    with rng:
        network(torch.randn(5, 4))
    torch.compiler.reset()
    weights, batch, streams = static[6, 4], static[5, 4], static[5,]
    assert (weights, batch, streams) == (True, False, False)


def test_what_no_compiler_shows_is_refused_in_a_graph(compiler: Graphs) -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + torch.rand_like(x))
    with pytest.raises(RuntimeError, match=r"calls rand_like, .* write torch\.empty_like\(x\)\.uniform_"):
        Compiler(CompileSettings(), CompiledSampleRNG.modes).backend(graph, [])


def test_graphs_of_training_and_of_an_evaluation_are_counted_in_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "compile.mode=default", "loop.micro_batches=1", "log=[console]", "run.dir=run"]
    with patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        assert product(Launch(), tmp_path, words) == 0
    torch.compiler.reset()
    counted = re.findall(r"compile: (.*), \d+ s until now", capsys.readouterr().out)
    assert counted == ["1 graph", "1 more, 2 graphs in all"]
