"""A configuration with its interpolations resolved: for reading, with everything; for writing, without secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.resolvers import oc

from trainer.messages import Refusal


def resolve_interpolations(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration as plain dicts, lists and scalars; by its path a line for each value that does not resolve."""
    wrong: dict[str, str] = {}
    return _to_plain(cfg, "", wrong), wrong


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Everything in a plain configuration by its dotted path: sections, keys, items of lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    values: dict[str, Any] = {}
    for key, value in items:
        values[f"{prefix}{key}"] = value
        values |= flatten(value, f"{prefix}{key}.")
    return values


def flatten_unresolved(cfg: DictConfig, prefix: str = "") -> dict[str, Any]:
    """Everything in a configuration by its path, interpolations left as they are: what messages may show."""
    return flatten(OmegaConf.to_container(cfg, resolve=False), prefix)


def format_value(value: Any) -> str:
    """A value as it was written, short enough for a line; an interpolation stays one, so that no secret is shown."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def format_override(written: Mapping[str, Any], path: str) -> str:
    """`key=value` for a message; the whole of what was written where one interpolation stands for several keys."""
    above = path
    while above and above not in written:
        above = above.rpartition(".")[0]
    return f"{path}={format_value(written.get(above, '${…}'))}"


def to_yaml(cfg: DictConfig) -> str:
    """The configuration as yaml, resolved, but for what depends on the environment: secrets stay `${oc.env:NAME}`."""
    # Resolving is the only way to learn whether a value depends on the environment, through others perhaps: what
    # fails while the environment cannot be asked stays as it was written.
    with _hide_environment():
        return yaml.safe_dump(_to_plain(cfg, "", {}), sort_keys=False, allow_unicode=True, width=120)


@contextmanager
def _hide_environment() -> Iterator[None]:
    """Let every interpolation fail that asks for an environment variable, directly or through others."""

    def sealed(*_: Any) -> str:
        raise InterpolationResolutionError("the environment is not written down")

    OmegaConf.register_new_resolver("oc.env", sealed, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _to_plain(node: Any, path: str, wrong: dict[str, str]) -> Any:
    """What resolves, resolved; the rest as it was written, with the reason in `wrong`."""

    def leaf(key: Any) -> Any:
        # Each value by itself: to_container ends at the first that fails, and all are to be told.
        where = f"{path}.{key}".lstrip(".")
        try:
            return _to_plain(node[key], where, wrong)
        except OmegaConfBaseException as error:
            raw: Any = OmegaConf.to_container(node, resolve=False)
            wrong[where] = f"{where}={raw[key]}: {_unresolved_reason(raw[key], error)}"
            return raw[key]

    if isinstance(node, DictConfig):
        return {str(key): leaf(key) for key in node}
    return [leaf(index) for index in range(len(node))] if isinstance(node, ListConfig) else node


def _unresolved_reason(written: Any, error: OmegaConfBaseException) -> str:
    if written == "???":
        return "a value must be given"
    # OmegaConf puts the cause last, behind what it was doing; the lines after it are its own names of things.
    reason = str(error).splitlines()[0].split("raised while resolving interpolation: ")[-1].strip("\"'")
    # An interpolation may be put together from the environment: only names that stand in it literally are repeated.
    # a name that came out of an environment variable may be a secret
    known = all(name in str(written) for name in re.findall(r"'([^']*)'", reason))
    if not known:
        return "this interpolation cannot be resolved"
    # what networks ask most often, and a data set of one's own need not say
    fact = re.search(r"key 'data\.(\w+)' not found", reason)
    return f"the yaml of data says no {fact[1]}; add it there, or give a value here" if fact else reason


Plain: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
_MAX_VALUES = 10_000  # values of a file in which every reference has been replaced by what it refers to


def refuse_alias_bombs(folders: Iterable[Path]) -> None:
    """Refuse a lab's yaml file whose references multiply: Hydra follows each of them, for minutes and gigabytes."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        text = path.read_bytes()
        # an anchor and a reference to it, and no product, pattern or emphasis in a text
        anchors = set(re.findall(rb"(?<![^\s\[{,:-])&([^\s,\[\]{}]+)", text))
        if anchors.isdisjoint(re.findall(rb"(?<![^\s\[{,:-])\*([^\s,\[\]{}]+)", text)):
            continue
        try:
            document = yaml.compose(text, Plain)  # a graph, in which what is referred to stands once
        except (yaml.YAMLError, ValueError):
            continue  # Hydra says what is wrong, if it is asked for this file
        if document is not None and (values := _count_values(document, {})) > _MAX_VALUES:
            size = "without end" if math.isinf(values) else f"{values:,.0f} values"
            raise Refusal(f"{path}: its references (*name) make {size} of it; at most {_MAX_VALUES:,} are read")


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """How many values a node has, each reference followed; infinity where it refers to itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf  # until it is counted
        children = (
            [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
        )
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children if isinstance(child, yaml.Node))
    return counts[id(node)]
