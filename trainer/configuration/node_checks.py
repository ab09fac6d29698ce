"""What may stand inside a group's node: keys of a signature, and nodes that name a class of their own."""

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

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.configuration.import_allowlist import Names, real_name
from trainer.configuration.resolved import quoted_from
from trainer.configuration.value_types import converted, in_steps
from trainer.data.data import Data
from trainer.learning.task import Task
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


# What a configuration is for, from packages that were not written for this. torchvision's older transforms are plain
# classes, which is why their module is named; of data sets only those are here that hold what they are given.
KINDS = (nn.Module, Task, Data, ParallelStyle)
MODULES = ("torchvision.transforms.", "torch.utils.data.dataset", "trainer.learning.schedule", "recipes.")
ELSEWHERE = "torch.distributed.nn."  # networks that are made on other machines


def refuse_inside(target: Any, names: Names, where: str) -> None:
    """Refuse what a node inside a group's may not call, though a configuration may name it.

    Of a lab everything may be called, of packages that the command line trusts every class, of others the classes of
    some kinds and records: a public class is not harmless for that. Making one of torch's may start a process
    (SubprocessHandler of torch.distributed.elastic) or write to a path (PackageExporter, SummaryWriter,
    every data set of torchvision's that downloads).
    """
    if names.beside(target):
        return
    kinds = f"{', '.join(kind.__name__ for kind in KINDS)}, transform or dataclass"
    if not isinstance(target, type):
        remedy = f"a class may be that is a {kinds}, or a function of your lab that calls this one"
        raise Refusal(f"{where}: {real_name(target)} may not be called here: it is a function; {remedy}")
    of_kind = issubclass(target, KINDS) and not target.__module__.startswith(ELSEWHERE)
    known = of_kind or target.__module__.startswith(MODULES) or _is_record(target)
    if not known and not names.trusted(target):
        package = target.__module__.split(".")[0]
        remedy = f"if you know what it does, name its package on the command line: trust=[{package}]"
        why = f"it is no {kinds} that keeps to itself"
        raise Refusal(f"{where}: {real_name(target)} may not be called here: {why}; {remedy}")


def _is_record(kind: type) -> bool:
    """Does making one only keep what it is given?

    Dataclasses and named tuples have a constructor that Python wrote, and it stores, unless they say what comes after
    it. So do the configurations of transformers, which were neither before its version 5.
    """
    # its own, for a class that inherits may have any; and not one that it wrote itself
    made = getattr(vars(kind).get("__init__"), "__code__", None)
    generated = "__dataclass_params__" in vars(kind) and made is not None and made.co_filename == "<string>"
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    configuration = any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)
    return (generated and not hasattr(kind, "__post_init__")) or named or configuration
