"""Keys of a configuration against the signature of what they are given to: names, what is missing, types."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor, nn

from trainer.configuration.settings import shown
from trainer.refusal import nearest


def problems(
    target: Callable, values: Mapping[str, Any], written: Any, where: str, given: Iterable[str] = ()
) -> list[str]:
    """One line for each key that the target does not take as it is; `given`: parameters that the caller supplies."""
    parameters = inspect.signature(target).parameters
    types_of = hints(target)
    named = {name: each for name, each in parameters.items() if each.kind not in _VARIADIC}
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    found = []
    for name, value in values.items():
        if name in given or (name not in named and not anything):
            free = [each for each in named if each not in given]
            found.append(f"{where}.{name}: {_called(target)} takes no such key{nearest(name, free) or _listed(free)}")
        elif name in named and not _fits_parameter(value, named[name], types_of.get(name, Any)):
            word = shown(written, name)
            found.append(f"{where}.{name}={word}: {_called(target)} expects {describe(types_of[name])}")
    needed = [name for name, each in named.items() if each.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in values and name not in given]
    return found + [f"{where}.{name}: {_called(target)} needs it" for name in missing]


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
    found: dict[str, Any] = {}
    for owner in owners:
        module = inspect.getmodule(owner)
        names = getattr(owner, "__globals__", vars(module) if module else {})
        for name, written in _annotations(owner).items():
            try:
                found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: written}), names)
            except (NameError, TypeError, AttributeError, SyntaxError):
                found.pop(name, None)
    return found


def _annotations(owner: Any) -> dict[str, Any]:
    return inspect.get_annotations(owner) if isinstance(owner, type | types.FunctionType) else {}


def _fits_parameter(value: Any, parameter: inspect.Parameter, annotation: Any) -> bool:
    # `width: int = None` is written by many and means what it says
    return (value is None and parameter.default is None) or fits(value, annotation)


def fits(value: Any, annotation: Any) -> bool:
    """Can this value, out of a yaml, be what the annotation asks for? Yes where one cannot know."""
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # an object that is still to be built
    origin, args = _opened(annotation)
    if annotation in (None, type(None)):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is typing.Annotated:
        return fits(value, args[0])
    if origin in (list, set, frozenset, Sequence, Iterable) or annotation in (list, set, frozenset, Sequence):
        return isinstance(value, list) and all(fits(item, args[0]) for item in value if args)
    if origin is tuple or annotation is tuple:
        return isinstance(value, list) and _fits_tuple(value, args)
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return isinstance(value, Mapping)
    return _fits_class(value, annotation)


def _opened(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(annotation), get_args(annotation)


def _fits_tuple(value: list, args: tuple) -> bool:
    if not args:
        return True
    if len(args) == 2 and args[1] is Ellipsis:
        return all(fits(item, args[0]) for item in value)
    return len(value) == len(args) and all(fits(item, kind) for item, kind in zip(value, args, strict=True))


def _fits_class(value: Any, annotation: Any) -> bool:
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation in (str, Path):
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    if isinstance(annotation, type) and issubclass(annotation, Tensor | nn.Module):
        return isinstance(value, annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return isinstance(value, str | int | annotation)
    return value is not None or annotation is Any or annotation is inspect.Parameter.empty or _open(annotation)


def _open(annotation: Any) -> bool:
    """Is it an annotation that says too little to refuse null: a type variable, `object`?"""
    return annotation is object or not isinstance(annotation, type)


def describe(annotation: Any) -> str:
    """What the annotation asks for, in a user's words."""
    origin, args = _opened(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(each) for each in args if each is not Tensor))
    if origin is Literal:
        return "one of " + ", ".join(str(each) for each in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}"
    if origin in (list, tuple, Sequence, Iterable) or annotation in (list, tuple):
        return "a list"
    return _PLAIN.get(annotation) or str(getattr(annotation, "__name__", annotation))


_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a section",
}


def converted(value: Any, annotation: Any) -> Any:
    """The value as the annotation has it where yaml has no such type: tuples, paths, text that looks like a number."""
    origin, args = _opened(annotation)
    if origin in (Union, types.UnionType):
        fitting = [each for each in args if fits(value, each)]
        exact = [each for each in fitting if type(value) is each]
        return value if exact or not fitting else converted(value, fitting[0])
    if isinstance(value, list) and (origin is tuple or annotation is tuple):
        return tuple(value)
    if annotation is Path and isinstance(value, str | int | float):
        return Path(str(value))
    if annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return float(value) if annotation is float and type(value) is int else value
