"""References inside a yaml file (`&name`, `*name`), which can make a small file as large as memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import yaml

from trainer.refusal import Refusal

_MOST = 10_000  # values of a file in which every reference has been replaced by what it refers to


def refuse_bombs(folders: Iterable[Path]) -> None:
    """Refuse a lab's yaml file whose references multiply: Hydra follows each of them, for minutes and gigabytes."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        text = path.read_bytes()
        if b"&" not in text or b"*" not in text:
            continue
        try:
            root = yaml.compose(text, yaml.SafeLoader)  # a graph, in which what is referred to stands once
        except (yaml.YAMLError, ValueError):
            continue  # Hydra says what is wrong, if it is asked for this file
        if root is not None and (values := _values(root, {})) > _MOST:
            many = "without end" if math.isinf(values) else f"{values:,.0f} values"
            raise Refusal(f"{path}: its references (*name) make {many} of it; at most {_MOST:,} are read")


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node has, each reference followed; infinity where it refers to itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_values(each, known) for each in inner if isinstance(each, yaml.Node))
    return known[id(node)]
