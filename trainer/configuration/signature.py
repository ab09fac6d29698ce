"""Keys of a configuration against the signature of what they are given to: names, what is missing, types."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from trainer.configuration.resolved import quoted_from
from trainer.configuration.value_types import converted, in_steps
from trainer.refusal import Refusal, nearest

_TYPO = 0.85  # this alike are two names of which one is mistyped: hiden_size, hidden_size
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bound(
    target: Callable, values: Mapping[str, Any], written: Mapping[str, Any], where: str, given: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The values as the target takes them, and one line for each key that it does not take.

    written: all values by their path, for messages; given: parameters that the caller supplies.
    """
    # as far as the signature tells: *args and **kwargs take what cannot be known
    parameters = inspect.signature(target).parameters
    types_of, called = hints(target), getattr(target, "__qualname__", repr(target))
    named = {name: each for name, each in parameters.items() if each.kind not in _VARIADIC}
    anything = _takes_words(inspect.signature(target))
    around = _constructor(target) if isinstance(target, type) else target
    more = hasattr(around, "__wrapped__") and _takes_words(inspect.signature(around, follow_wrapped=False))

    # A key is nobody's, or of another type; where a target takes **kwargs, only the call itself can tell.
    taken, problems = dict(values), []
    for name, value in values.items():
        # what wraps a constructor may take more than it, as configurations of transformers take any key
        if name in given or (name not in named and not anything and not (more and _meant(name, target, named))):
            free = [each for each in named if each not in given]
            listed = f"; it takes {', '.join(free[:12]) or 'none'}"
            problems.append(f"{where}.{name}: {called} takes no such key{nearest(name, free) or listed}")
        # `width: int = None` is written by many and means what it says
        elif name in named and name in types_of and not (value is None and named[name].default is None):
            try:
                taken[name] = converted(value, types_of[name])
            except Refusal as expected:
                said = quoted_from(written, f"{where}.{name}")
                problems.append(f"{said}: {called} expects {expected}{in_steps(value)}")
    return taken, problems


def _meant(name: str, target: Callable, named: Collection[str]) -> bool:
    """Is it a key of its own, and not a mistyped one of those that are known?"""
    return hasattr(target, name) or not get_close_matches(name, named, n=1, cutoff=_TYPO)


def _takes_words(signature: inspect.Signature) -> bool:
    """Does it end with **kwargs?"""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())


def missing(target: Callable, present: Collection[str], where: str) -> list[str]:
    """One line for each parameter that has no default and is not present."""
    called = getattr(target, "__qualname__", repr(target))
    parameters = inspect.signature(target).parameters.items()
    needed = [name for name, each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    return [f"{where}.{name}: {called} needs it" for name in needed if name not in present]


def hints(target: Callable) -> dict[str, Any]:
    """The types of the parameters, as far as they can be known: names that only a type checker imports are left out."""
    owner = inspect.unwrap(_constructor(target) if isinstance(target, type) else target)
    # a dataclass takes over its bases' fields as they are written there, in words of the bases' own files
    files = [vars(sys.modules[kind.__module__]) for kind in inspect.getmro(target)] if isinstance(target, type) else []
    scope = dict(ChainMap(getattr(owner, "__globals__", {}), *files))
    found: dict[str, Any] = {}
    # One by one: typing.get_type_hints gives up on all of them where one name is not there at run time.
    for name, written in inspect.get_annotations(owner).items():
        with suppress(NameError, TypeError, AttributeError, SyntaxError):
            found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: written}), scope)
    return found


def _constructor(kind: type) -> Callable:
    return getattr(kind, "__init__")  # noqa: B009 - a type checker refuses to look at it through an instance's class
