"""Subtrees of a network that belong together."""

from __future__ import annotations

from torch import nn

from trainer.parallel.tensor import _matches
from trainer.plan import Plan


def units(network: nn.Module, plan: Plan) -> list[str]:
    """Names of the subtrees that are gathered, recomputed and compiled together."""
    return [name for key in plan.shard for name, _ in _matches(network, key)]
