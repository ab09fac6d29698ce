"""Parameters by name patterns, and `optimizer.groups`: other learning rates or weight decay for some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainer.messages import Refusal, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


BACKBONE = "backbone"  # the pattern for what the network's attribute of this name lists


def matches_exactly(pattern: str, name: str) -> bool:
    """Does the pattern match this name? `*`, `?`, `[1-3]`, `[!a]` match within one level, as fnmatch does."""
    return bool(name) and pattern.count(".") == name.count(".") and matches_or_contains(pattern, name)


def matches_or_contains(pattern: str, name: str) -> bool:
    """Does the pattern match this name, or a module in which it lies?"""
    levels, parts = pattern.split("."), name.split(".")
    return len(parts) >= len(levels) and all(map(fnmatchcase, parts, levels))


def resolve_pattern(network: nn.Module, pattern: str, where: str) -> tuple[str, ...]:
    """The pattern as a tuple; for `backbone` the names that the network has in an attribute of this name.

    Refusal of a pattern that matches no parameter. where: the key of the configuration, for the message.
    """
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if any(matches_or_contains(pattern, name) for name in names):
        return (pattern,)
    kind, tops = type(network).__name__, ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    if pattern == BACKBONE:
        backbone = getattr(network, BACKBONE, None)
        if isinstance(backbone, tuple):
            return backbone
        raise Refusal(f"{where}: {kind} does not say what its backbone is; its parts are {tops}")
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    suggestion = did_you_mean(pattern, [*modules, *names])
    raise Refusal(f"{where}: {pattern!r} matches no parameter of {kind}; it has {tops}{suggestion}")


@dataclass(frozen=True)
class Rule:
    """One entry of `optimizer.groups`: parameters with another learning rate or decay; None: as all others."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    resolved: tuple[str, ...] = ()  # patterns for this network: of `backbone` its names

    def applies_to(self, name: str) -> bool:
        """Is this the name of one of its parameters?"""
        return any(matches_or_contains(pattern, name) for pattern in self.resolved)

    def count_parameters(self, network: nn.Module) -> int:
        """How many elements of trainable parameters it applies to."""
        parameters = network.named_parameters(remove_duplicate=False)  # a tied weight by any of its names
        return sum(p.numel() for p in {p for name, p in parameters if p.requires_grad and self.applies_to(name)})

    def hyperparameters(self) -> dict[str, float]:
        """Its keys of a parameter group of torch.optim."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {key: value for key, value in values.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.pattern}: " + ", ".join(f"{key} {value:g}" for key, value in self.hyperparameters().items())


def resolve_rules(network: nn.Module, rules: Sequence[Rule]) -> list[Rule]:
    """The rules, with their patterns resolved for this network. Refusal of one that matches nothing trainable."""
    resolved = []
    for rule in rules:
        rule = replace(rule, resolved=resolve_pattern(network, rule.pattern, "optimizer.groups"))
        if not rule.count_parameters(network):
            raise Refusal(f"optimizer.groups: every parameter of {rule.pattern!r} is frozen; leave this group out")
        resolved.append(rule)
    return resolved
