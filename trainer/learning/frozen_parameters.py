"""Parts of a network that do not learn: no gradient, and BatchNorms that keep their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Self

from torch import nn

from trainer.learning.parameter_patterns import spelled_out, within
from trainer.refusal import Refusal

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # that know the samples of their own process alone
NORMS = (*BATCH_NORMS, nn.SyncBatchNorm)  # what has running statistics


class Still(nn.Module):
    """What a BatchNorm becomes that is frozen: it stays in evaluation mode, in training too."""

    def train(self, mode: bool = True) -> Self:
        """Stay as it is."""
        return super().train(False)


def freeze(network: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Freeze, in place, what these patterns mean: parameters, and whole modules with their BatchNorms.

    Values are not looked at, so the network may be an outline. Refusal of a pattern that means nothing.
    """
    meant = [one for pattern in patterns for one in spelled_out(network, pattern, "model.freeze")]

    def is_meant(name: str) -> bool:
        return any(within(pattern, name) for pattern in meant)

    # of tied weights any name counts: the tensor is one
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if is_meant(name):
            parameter.requires_grad_(False)
    # without a gradient a norm would still move its statistics by every batch that it sees
    for name, module in network.named_modules():
        if isinstance(module, NORMS) and not isinstance(module, Still):
            own = [f"{name}.{last}" for last, _ in module.named_parameters()]
            # one whose scale and shift are named is meant as well as one inside of what is named
            if is_meant(name) or (own and all(is_meant(one) for one in own)):
                module.__class__ = _still(type(module))  # type: ignore[arg-type,assignment]  # no class is hashable
                module.eval()
    return network


@cache
def _still(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name that stays in evaluation mode: not a wrapper, so that all names stay."""
    return type(kind.__name__, (Still, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def frozen(network: nn.Module) -> set[str]:
    """The names of the parameters that do not learn, each of their names."""
    return {name for name, one in network.named_parameters(remove_duplicate=False) if not one.requires_grad}


def trainable(network: nn.Module) -> int:
    """How many numbers of the network learn."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def refuse_frozen(network: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a network of which nothing learns."""
    if not trainable(network):
        why = f"; model.freeze={list(patterns)} leaves none" if patterns else ""
        raise Refusal(f"{type(network).__name__} has no trainable parameter{why}")
