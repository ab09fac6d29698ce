"""Keys that nothing reads: which they are, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from difflib import SequenceMatcher
from typing import Any

from omegaconf import DictConfig

from trainer.configuration.resolved import as_written
from trainer.configuration.settings import GROUPS, SECTIONS, Settings


def paths(node: Any, prefix: str = "") -> list[str]:
    """The dotted path of everything in a plain configuration: sections, keys, items of lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = []
    for key, value in items:
        found.append(f"{prefix}{key}")
        found += paths(value, f"{prefix}{key}.")
    return found


def unknown(path: str, known: Iterable[str]) -> str:
    """Say that nothing is called so, and what comes nearest."""
    near = nearest_paths(path, known)
    return f"{path}: there is no such key or group" + (f"; did you mean {' or '.join(near)}?" if near else ".")


def nearest_paths(path: str, known: Iterable[str]) -> list[str]:
    """Up to three paths that are called nearly so, by their whole name or by its last part, the nearest first."""
    above, _, last = path.rpartition(".")

    def likeness(other: str) -> float:
        beside, _, end = other.rpartition(".")
        shared = 0.61 if set(last.split("_")) & set(end.split("_")) else 0.0  # batch_size, global_batch
        whole = _ratio(path, other) if above != beside else 0.0  # what both begin with says nothing
        return max(whole, 0.95 * _ratio(last, end), shared)

    # no special keys (_target_), no items of lists
    named = [each for each in known if not re.search(r"\._|\.\d+$", each) and not f"{path}.".startswith(f"{each}.")]
    scored = {other: likeness(other) for other in named}
    best = sorted((other for other in scored if scored[other] > 0.6), key=scored.__getitem__, reverse=True)
    return [other for other in best if scored[other] > scored[best[0]] - 0.1][:3]


def _ratio(one: str, other: str) -> float:
    match = SequenceMatcher(None, one, other, autojunk=False)
    return match.ratio() if match.real_quick_ratio() > 0.6 else 0.0


def unread(cfg: DictConfig, known: list[str]) -> list[str]:
    """One line for each key of a composed configuration that nothing reads. Keys of groups are their targets' business.

    A key that an interpolation refers to is read by that: a lab may write a number once and use it twice.
    """
    plain = as_written(cfg)
    referred = set(re.findall(r"[$.\w]+", " ".join(re.findall(r"\$\{[^}]*\}?", str(plain)))))
    own = {each.name for each in fields(Settings)} - {"decay", "fused"} | set(GROUPS)
    problems = []
    for key, value in plain.items():
        if key in SECTIONS and isinstance(value, dict):
            names = {each.name for each in fields(SECTIONS[key])}
            problems += [unknown(f"{key}.{name}", known) for name in value if name not in names]
        elif key not in own and str(key) not in {path.split(".")[0] for path in referred}:
            problems.append(_astray(str(key), known))
    return problems


def _astray(key: str, known: list[str]) -> str:
    if key == "experiment":
        return "experiment: the first line of an experiment's file must be: # @package _global_"
    return unknown(key, known)
