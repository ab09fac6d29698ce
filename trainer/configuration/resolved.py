"""A configuration with its interpolations resolved: for reading, with everything; for writing, without secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.resolvers import oc

UNRESOLVED = object()  # stands where a value could not be had; what is wrong with it is already in the list of problems


def resolved(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """The configuration as plain dicts, lists and scalars, and one line for each value that cannot be resolved."""
    problems: list[str] = []

    def missing(path: str, written: Any, error: OmegaConfBaseException | None) -> Any:
        problems.append(f"{path}=???: a value must be given" if error is None else _unresolvable(path, written, error))
        return UNRESOLVED

    return _plain(cfg, missing), problems


def as_written(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars, with its interpolations left as they are."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def written(cfg: DictConfig) -> str:
    """The configuration as yaml, resolved, but for what depends on the environment: secrets stay `${oc.env:NAME}`."""

    def kept(path: str, written: Any, error: OmegaConfBaseException | None) -> Any:
        return written

    # Resolving is the only way to learn whether a value depends on the environment, through others perhaps: what
    # fails while the environment cannot be asked stays as it was written.
    with _environment_sealed():
        return yaml.safe_dump(_plain(cfg, kept), sort_keys=False, allow_unicode=True, width=120)


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


Fallback = Callable[[str, Any, OmegaConfBaseException | None], Any]


def _plain(node: Any, fallback: Fallback, path: str = "") -> Any:
    def leaf(key: Any) -> Any:
        where = f"{path}.{key}".lstrip(".")
        # ??? is no interpolation; through one OmegaConf would call the value missing, too
        if OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            return fallback(where, "???", None)
        # Each value by itself: to_container ends at the first that fails, and all are to be told.
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            plain: Any = OmegaConf.to_container(node, resolve=False)
            return fallback(where, plain[key], error)
        return _plain(value, fallback, where)

    if isinstance(node, DictConfig):
        return {str(key): leaf(key) for key in node}
    return [leaf(index) for index in range(len(node))] if isinstance(node, ListConfig) else node


def _unresolvable(path: str, written: Any, error: OmegaConfBaseException) -> str:
    reason = str(error).splitlines()[0].split("raised while resolving interpolation: ")[-1].strip("\"'")
    # An interpolation may be put together from the environment: only names that stand in it literally are repeated.
    known = all(name in str(written) for name in re.findall(r"'([^']*)'", reason))
    return f"{path}={written}: {reason if known else 'this interpolation cannot be resolved'}"
