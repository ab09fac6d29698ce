"""Which modules a plan's key means."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn


def matches(network: nn.Module, key: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose name fits a plan's key; `*` and the like stand within one level, as in parallelize_module."""
    levels = [re.compile(_as_expression(level)) for level in key.split(".")]
    for name, module in network.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(levels) and all(level.fullmatch(part) for level, part in zip(levels, parts, strict=True)):
            yield name, module


def _as_expression(level: str) -> str:
    """fnmatch's wildcards for one level of a name."""
    return re.escape(level).replace(r"\*", ".*").replace(r"\?", ".").replace(r"\[", "[").replace(r"\]", "]")
