"""Keys of a configuration against the signature of what they are given to: names, what is missing, types."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.configuration.values import below, describe, fits, in_steps, shown
from trainer.refusal import nearest

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def problems(
    target: Callable, values: Mapping[str, Any], written: Any, where: str, given: Iterable[str] = ()
) -> list[str]:
    """One line for each key that the target does not take as it is; `given`: parameters that the caller supplies."""
    parameters = inspect.signature(target).parameters
    types_of = hints(target)
    named = {name: each for name, each in parameters.items() if each.kind not in _VARIADIC}
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    # A key is nobody's, or of another type; where a target takes **kwargs, only the call itself can tell.
    found = []
    for name, value in values.items():
        if name in given or (name not in named and not anything):
            free = [each for each in named if each not in given]
            found.append(f"{where}.{name}: {_called(target)} takes no such key{nearest(name, free) or _listed(free)}")
        # `width: int = None` is written by many and means what it says
        elif value is None and name in named and named[name].default is None:
            continue
        elif name in named and not fits(value, types_of.get(name, Any)):
            expected = describe(types_of[name]) + in_steps(value)
            found.append(f"{where}.{name}={shown(below(written, name))}: {_called(target)} expects {expected}")

    # What has no default must come from somewhere.
    needed = [name for name, each in named.items() if each.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in values and name not in given]
    return found + [f"{where}.{name}: {_called(target)} needs it" for name in missing]


def _called(target: Callable) -> str:
    return getattr(target, "__qualname__", repr(target))


def _listed(names: list[str]) -> str:
    return f"; it takes {', '.join(names[:12])}" if names else "; it takes none"


def hints(target: Callable) -> dict[str, Any]:
    """The types of the parameters, as far as they can be known: names that only a type checker imports are left out."""
    if isinstance(target, type):
        # a dataclass's fields were annotated in its bases' modules, and must be read there
        fields = dataclasses.is_dataclass(target)
        owners: list[Any] = list(reversed(target.__mro__[:-1])) if fields else [vars(target).get("__init__")]
        owners = owners if owners[0] is not None else [getattr(target, "__init__")]  # noqa: B009
    else:
        owners = [inspect.unwrap(target)]

    # One by one: typing.get_type_hints gives up on all of them where one name is not there at run time.
    found: dict[str, Any] = {}
    for owner in owners:
        module = inspect.getmodule(owner)
        names = getattr(owner, "__globals__", vars(module) if module else {})
        own = inspect.get_annotations(owner) if isinstance(owner, type | types.FunctionType) else {}
        for name, written in own.items():
            try:
                found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: written}), names)
            except (NameError, TypeError, AttributeError, SyntaxError):
                found.pop(name, None)
    return found
