"""A configuration with its interpolations resolved: for reading, with everything; for writing, without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.resolvers import oc


def resolved(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration as plain dicts, lists and scalars; by its path a line for each value that does not resolve."""
    wrong: dict[str, str] = {}
    return _plain(cfg, "", wrong), wrong


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Everything in a plain configuration by its dotted path: sections, keys, items of lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found: dict[str, Any] = {}
    for key, value in items:
        found[f"{prefix}{key}"] = value
        found |= flat(value, f"{prefix}{key}.")
    return found


def as_written(cfg: DictConfig, prefix: str = "") -> dict[str, Any]:
    """Everything in a configuration by its path, interpolations left as they are: what messages may show."""
    return flat(OmegaConf.to_container(cfg, resolve=False), prefix)


def format_value(written: Any) -> str:
    """A value as it was written, short enough for a line; an interpolation stays one, so that no secret is shown."""
    text = "null" if written is None else str(written).lower() if isinstance(written, bool) else str(written)
    return text if len(text) <= 80 else text[:77] + "..."


def quoted_from(written: Mapping[str, Any], path: str) -> str:
    """`key=value` for a message; the whole of what was written where one interpolation stands for several keys."""
    above = path
    while above and above not in written:
        above = above.rpartition(".")[0]
    return f"{path}={format_value(written.get(above, '${…}'))}"


def written(cfg: DictConfig) -> str:
    """The configuration as yaml, resolved, but for what depends on the environment: secrets stay `${oc.env:NAME}`."""
    # Resolving is the only way to learn whether a value depends on the environment, through others perhaps: what
    # fails while the environment cannot be asked stays as it was written.
    with _environment_sealed():
        return yaml.safe_dump(_plain(cfg, "", {}), sort_keys=False, allow_unicode=True, width=120)


@contextmanager
def _environment_sealed() -> Iterator[None]:
    """Let every interpolation fail that asks for an environment variable, directly or through others."""

    def sealed(*_: Any) -> str:
        raise InterpolationResolutionError("the environment is not written down")

    OmegaConf.register_new_resolver("oc.env", sealed, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _plain(node: Any, path: str, wrong: dict[str, str]) -> Any:
    """What resolves, resolved; the rest as it was written, with the reason in `wrong`."""

    def leaf(key: Any) -> Any:
        # Each value by itself: to_container ends at the first that fails, and all are to be told.
        where = f"{path}.{key}".lstrip(".")
        try:
            return _plain(node[key], where, wrong)
        except OmegaConfBaseException as error:
            raw: Any = OmegaConf.to_container(node, resolve=False)
            wrong[where] = f"{where}={raw[key]}: {_reason(raw[key], error)}"
            return raw[key]

    if isinstance(node, DictConfig):
        return {str(key): leaf(key) for key in node}
    return [leaf(index) for index in range(len(node))] if isinstance(node, ListConfig) else node


def _reason(written: Any, error: OmegaConfBaseException) -> str:
    if written == "???":
        return "a value must be given"
    # OmegaConf puts the cause last, behind what it was doing; the lines after it are its own names of things.
    reason = str(error).splitlines()[0].split("raised while resolving interpolation: ")[-1].strip("\"'")
    # An interpolation may be put together from the environment: only names that stand in it literally are repeated.
    known = all(name in str(written) for name in re.findall(r"'([^']*)'", reason))
    if not known:
        return "this interpolation cannot be resolved"
    # what networks ask most often, and a data set of one's own need not say
    fact = re.search(r"key 'data\.(\w+)' not found", reason)
    return f"the yaml of data says no {fact[1]}; add it there, or give a value here" if fact else reason
