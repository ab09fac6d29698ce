"""Compiling by units: how many graphs there are; what they compute, tests/strategies/test_order.py shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.parallel.activation_checkpointing import apply_activation_checkpointing
from trainer.parallel.module_units import compile_units, without_compile

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


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that were made, which run as they are: no compiler is called."""
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    original, config = nn.Module.compile, torch.compiler.config
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: original(self, backend=backend, **how))
    limits = config.recompile_limit, config.accumulated_recompile_limit
    yield made
    config.recompile_limit, config.accumulated_recompile_limit = limits
    torch.compiler.reset()


def names(network: nn.Module) -> list[str]:
    return [name for name, _ in network.named_children() if name != "0"]


def test_alike_units_share_a_graph(graphs: list[Any]) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Alike(4) for _ in range(12)))
    plain = network(torch.ones(3, 4))
    compile_units(network, names(network))
    assert torch.equal(network(torch.ones(3, 4)), plain)
    assert len(graphs) == 1
    network(torch.ones(5, 4))
    network(torch.ones(7, 4))
    assert len(graphs) == 2  # one for any other size


def test_more_units_of_one_class_than_torch_would_compile_are_compiled_each_by_its_sizes(graphs: list[Any]) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Block(4 + index) for index in range(12)))
    compile_units(network, names(network))
    network(torch.ones(3, 4))
    assert len(graphs) == 12
    sizes = [tuple(node.meta["example_value"].shape) for node in _inputs(graphs[-1])]
    assert (3, 15) in sizes  # numbers, no symbols for what could vary


def _inputs(graph: Any) -> Iterator[Any]:
    return (node for node in graph.graph.nodes if node.op == "placeholder" and "example_value" in node.meta)


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # torch 2.11 looks into no forward of its own
        for block in self:
            x = block(x)
        return x


def test_without_units_the_network_is_one_graph_under_its_own_names(graphs: list[Any]) -> None:
    network = Chain(nn.Linear(4, 4), *(Block(4 + index) for index in range(3)))
    before = list(network.state_dict())
    compile_units(network, [])
    network(torch.ones(3, 4))
    assert len(graphs) == 1
    assert list(network.state_dict()) == before


@pytest.mark.parametrize("mode", ["units", "operators"])
def test_recomputed_units_share_a_graph_too_with_what_is_recomputed_in_it(graphs: list[Any], mode: Any) -> None:
    network = nn.Sequential(nn.Linear(4, 4), *(Alike(4) for _ in range(3)))
    apply_activation_checkpointing(network, names(network), mode)
    compile_units(network, names(network))
    network(torch.ones(3, 4)).sum().backward()
    assert len(graphs) == 1
    assert "checkpoint" in graphs[0].code
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_rehearsal_compiles_nothing(graphs: list[Any]) -> None:
    network = nn.Sequential(nn.Linear(4, 4), Alike(4))
    compile_units(network, ["1"])
    with without_compile():
        network(torch.ones(2, 4)).sum().backward()
    assert not graphs
    network(torch.ones(3, 4))
    network(torch.ones(3, 4))
    assert len(graphs) == 1
