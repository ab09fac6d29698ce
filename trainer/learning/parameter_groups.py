"""Parts of a network by pattern, and hyper-parameters of their own for some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainer.messages import Refusal, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


BACKBONE = "backbone"  # a word for what the network itself says is its backbone


def matches_exactly(pattern: str, name: str) -> bool:
    """Is this the name of what the pattern means? `*`, `?`, `[1-3]`, `[!a]` stand within one level (fnmatch)."""
    return bool(name) and pattern.count(".") == name.count(".") and matches_or_contains(pattern, name)


def matches_or_contains(pattern: str, name: str) -> bool:
    """Does what has this name lie in what the pattern means, or is it that?"""
    levels, own = pattern.split("."), name.split(".")
    return len(own) >= len(levels) and all(fnmatchcase(word, level) for level, word in zip(levels, own, strict=False))


def resolve_pattern(network: nn.Module, pattern: str, where: str) -> tuple[str, ...]:
    """The pattern; for `backbone` what the network says that is, in an attribute of this name.

    Refusal, for the key `where`, of a pattern in which no parameter lies.
    """
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if any(matches_or_contains(pattern, name) for name in names):
        return (pattern,)
    kind, tops = type(network).__name__, ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    if pattern == BACKBONE:
        said = getattr(network, BACKBONE, None)
        if isinstance(said, tuple):
            return said
        raise Refusal(f"{where}: {kind} does not say what its backbone is; its parts are {tops}")
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    near = did_you_mean(pattern, [*modules, *names])
    raise Refusal(f"{where}: {pattern!r} matches no parameter of {kind}; it has {tops}{near}")


@dataclass(frozen=True)
class Rule:
    """Parameters that a pattern means learn at another rate, or decay otherwise; None: as all others."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    means: tuple[str, ...] = ()  # the pattern as the network understands it

    def counts_for(self, name: str) -> bool:
        """Does it count for the parameter of this name?"""
        return any(matches_or_contains(pattern, name) for pattern in self.means)

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


def resolve_rules(network: nn.Module, rules: Sequence[Rule]) -> list[Rule]:
    """The rules, each as this network understands its pattern. Refusal of one that means nothing that learns."""
    found = []
    for rule in rules:
        rule = replace(rule, means=resolve_pattern(network, rule.pattern, "optimizer.groups"))
        if not rule.covers(network):
            raise Refusal(f"optimizer.groups: every parameter of {rule.pattern!r} is frozen; leave this group out")
        found.append(rule)
    return found
