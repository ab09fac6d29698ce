"""Parts of a network by pattern: which of its modules and parameters somebody means."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainer.refusal import Refusal, nearest

if TYPE_CHECKING:
    from torch import nn

BACKBONE = "backbone"  # a word for what the network itself says is its backbone


def fits(pattern: str, name: str) -> bool:
    """Is this the name of what the pattern means? `*`, `?`, `[1-3]`, `[!a]` stand within one level (fnmatch)."""
    return bool(name) and pattern.count(".") == name.count(".") and within(pattern, name)


def within(pattern: str, name: str) -> bool:
    """Does what has this name lie in what the pattern means, or is it that?"""
    levels, own = pattern.split("."), name.split(".")
    return len(own) >= len(levels) and all(fnmatchcase(word, level) for level, word in zip(levels, own, strict=False))


def spelled_out(network: nn.Module, pattern: str, where: str) -> tuple[str, ...]:
    """The pattern; for `backbone` what the network says that is, in an attribute of this name.

    Refusal, for the key `where`, of a pattern in which no parameter lies.
    """
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if any(within(pattern, name) for name in names):
        return (pattern,)
    kind, tops = type(network).__name__, ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    if pattern == BACKBONE:
        said = getattr(network, BACKBONE, None)
        if isinstance(said, tuple):
            return said
        raise Refusal(f"{where}: {kind} does not say what its backbone is; its parts are {tops}")
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    near = nearest(pattern, [*modules, *names])
    raise Refusal(f"{where}: {pattern!r} matches no parameter of {kind}; it has {tops}{near}")
