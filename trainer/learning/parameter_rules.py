"""Hyper-parameters of their own for some parameters: what a line of `optimizer.groups` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.learning.parameter_patterns import spelled_out, within
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class Rule:
    """Parameters that a pattern means learn at another rate, or decay otherwise; None: as all others."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    means: tuple[str, ...] = ()  # the pattern as the network understands it

    def counts_for(self, name: str) -> bool:
        """Does it count for the parameter of this name?"""
        return any(within(pattern, name) for pattern in self.means)

    def covers(self, network: nn.Module) -> int:
        """How many numbers of the network that learn it counts for."""
        every = network.named_parameters(remove_duplicate=False)  # a tied weight by any of its names
        own = {one for name, one in every if one.requires_grad and self.counts_for(name)}
        return sum(parameter.numel() for parameter in own)

    def words(self) -> dict[str, float]:
        """What it says, as a parameter group of torch.optim has it."""
        said = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {key: value for key, value in said.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.pattern}: " + ", ".join(f"{key} {value:g}" for key, value in self.words().items())


def understood(network: nn.Module, rules: Sequence[Rule]) -> list[Rule]:
    """The rules, each as this network understands its pattern. Refusal of one that means nothing that learns."""
    found = []
    for rule in rules:
        rule = replace(rule, means=spelled_out(network, rule.pattern, "optimizer.groups"))
        if not rule.covers(network):
            raise Refusal(f"optimizer.groups: every parameter of {rule.pattern!r} is frozen; leave this group out")
        found.append(rule)
    return found
