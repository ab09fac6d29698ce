"""Which Python a configuration may call, and with which keys.

A yaml file is data: what it names is looked up here, and nowhere else.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.configuration.interpolation import format_override, format_value
from trainer.configuration.key_types import epochs_hint
from trainer.configuration.removed_words import removed_class, removed_word
from trainer.data.data import Data
from trainer.launch.typed_values import convert
from trainer.learning.task import Task
from trainer.messages import Refusal, did_you_mean

PACKAGES = ("trainer", "recipes", "torch", "torchvision", "timm", "transformers")


@dataclass(frozen=True)
class AllowedTargets:
    """The packages and folders whose Python may be called."""

    trust: tuple[str, ...] = ()  # packages named on the command line
    folders: tuple[Path, ...] = ()  # of yaml files, given by --config-dir: Python that lies beside one may be called

    def import_target(self, name: Any, where: str) -> Callable[..., Any]:
        """The class or function of this name. Refusal where it may not be called or is not there; calls nothing."""
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            raise Refusal(f"{where}: {format_value(name)} is not the name of a class or function, like lab.net.Net")
        if name.startswith("__main__."):
            attribute = name.rpartition(".")[2]
            raise Refusal(
                f"{where}: {name} is written in a notebook's cell or a script, where a configuration, and every process"
                f" that is started, finds nothing. Write it into a file (in a notebook: %%writefile mine.py) and use "
                f"mine.{attribute} with trust=[mine]; or give the object itself to a Trainer (docs/python.md)"
            )
        # By its name alone, before anything is imported: importing runs code.
        if not self._is_allowed(name):
            raise Refusal(f"{where}: {name} may not be called from a configuration{self._remedy(name)}")
        if any(part.startswith("_") for part in name.split(".")):
            raise Refusal(f"{where}: {name} is private; name a public class or function")
        try:
            target = _import_target(name, where)
        except Refusal as error:
            raise Refusal(f"{where}: {gone}" if (gone := removed_class(name)) else str(error)) from error

        # A permitted module holds names of others that it imported (torch.os.system): where was this one written?
        if not callable(target):
            raise Refusal(f"{where}: {name} is a {type(target).__name__}, not a class or function")
        module = getattr(target, "__module__", None)
        if not isinstance(module, str) or not self._is_allowed(module):
            raise Refusal(
                f"{where}: {name} is really {qualified_name(target)}, which may not be called from a configuration"
            )
        return target

    def from_lab(self, target: Any) -> bool:
        """Was it written in a lab, beside a folder of yaml files?"""
        return self._in_lab(str(getattr(target, "__module__", "")))

    def from_trusted_package(self, target: Any) -> bool:
        """Does it come from a package that the command line names?"""
        return str(getattr(target, "__module__", "")).split(".")[0] in self.trust

    def _remedy(self, name: str) -> str:
        first = name.split(".")[0]
        # A lab is named like the folder that holds it, which is importable from the folder above.
        for lab in (folder.parent for folder in self.folders):
            if lab.name == first:
                return f": {first} is not importable here; start in {lab.parent}"
            if (lab / f"{first}.py").is_file():
                return f"; {first}.py lies in {lab}: write {lab.name}.{name}"
        return f"; names come from {', '.join(PACKAGES)}, from beside a --config-dir, or from trust=[{first}]"

    def _is_allowed(self, name: str) -> bool:
        return name.split(".")[0] in (*PACKAGES, *self.trust) or self._in_lab(name)

    def _in_lab(self, name: str) -> bool:
        """Does the module of this name lie beside a folder of yaml files? Nothing is imported to find out."""
        place = _module_location(name)
        homes = [folder.resolve().parent for folder in self.folders]
        return place is not None and any(place.is_relative_to(home) for home in homes) and not _is_installed(place)


def qualified_name(target: Any) -> str:
    """Where it was written and what it is called there."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__name__)}"


def _module_location(name: str) -> Path | None:
    """Where what has this dotted name would lie: its package's folder and the names below it; imports nothing."""
    first, *rest = name.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return None
    # A class has no file of its own; that its name would lie below the lab's folder is all that is asked.
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)), *rest).resolve()
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def _is_installed(place: Path) -> bool:
    """Does it belong to Python or to an installed package, although its folder contains the lab's?"""
    library = Path(sysconfig.get_path("stdlib")).resolve()
    # a lab in a home folder may hold the virtual environment, too
    return place.is_relative_to(library) or not {"site-packages", "dist-packages"}.isdisjoint(place.parts)


def is_own_code(file: str, module: str) -> bool:
    """Is this a file that the user has written: no package's, and none of the framework's?"""
    is_file = not file.startswith("<")  # <string>: what Python wrote, such as a dataclass's constructor
    return is_file and module.split(".")[0] not in PACKAGES and not _is_installed(Path(file).resolve())


def _import_target(name: str, where: str) -> Any:
    """Import the modules that the name begins with, then look into classes."""
    first, *parts = name.split(".")
    target, path = _import_module(first, name, where), first
    for part in parts:
        # a class inside a class, or a name that the package imports already
        if hasattr(target, part):
            target = getattr(target, part)
        elif isinstance(target, ModuleType):
            # a submodule that nobody has imported yet
            target = _import_module(f"{path}.{part}", name, where)
        else:
            raise Refusal(f"{where}: {name}: {path} has no {part}{did_you_mean(part, dir(target))}")
        path = f"{path}.{part}"
    return target


def _import_module(module: str, name: str, where: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:
        # Is it this module that is missing, or something that it imports itself?
        missing_module = error.name if isinstance(error, ModuleNotFoundError) and error.name else "."
        if module != missing_module and not module.startswith(f"{missing_module}."):
            error.add_note(f"while importing {module}, which {where}={name} names")
            raise
    parent, _, last = module.rpartition(".")
    hint = did_you_mean(last, dir(sys.modules[parent])) if parent in sys.modules else "; is it installed?"
    raise Refusal(f"{where}: {name}: there is no {module}{hint}")


_TYPO = 0.85  # this alike are two names of which one is mistyped: hiden_size, hidden_size
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bind_arguments(
    target: Callable, values: Mapping[str, Any], written: Mapping[str, Any], where: str, given: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The values as the target takes them, and one line for each key that it does not take.

    written: all values by their path, for messages; given: parameters that the caller supplies.
    """
    # as far as the signature tells: *args and **kwargs take what cannot be known
    parameters = inspect.signature(target).parameters
    annotations, target_name = parameter_types(target), getattr(target, "__qualname__", repr(target))
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind not in _VARIADIC}
    takes_any = _takes_kwargs(inspect.signature(target))
    # functools.wraps hides what the wrapper itself takes
    function = _constructor(target) if isinstance(target, type) else target
    wrapper_takes_any = hasattr(function, "__wrapped__") and _takes_kwargs(
        inspect.signature(function, follow_wrapped=False)
    )

    # A key is nobody's, or of another type; where a target takes **kwargs, only the call itself can tell.
    bound, problems = dict(values), []
    for name, value in values.items():
        # what wraps a constructor may take more than it, as configurations of transformers take any key
        if name in given or (
            name not in named and not takes_any and not (wrapper_takes_any and _is_separate_key(name, target, named))
        ):
            free_names = [parameter for parameter in named if parameter not in given]
            hint = f"; it takes {', '.join(free_names[:12]) or 'none'}"
            unknown = f"{where}.{name}: {target_name} takes no such key{did_you_mean(name, free_names) or hint}"
            problems.append(removed_word(f"{where}.{name}", value) or unknown)
        # `width: int = None` is written by many and means what it says
        elif name in named and name in annotations and not (value is None and named[name].default is None):
            try:
                bound[name] = convert(value, annotations[name])
            except Refusal as expected:
                written_value = format_override(written, f"{where}.{name}")
                problems.append(f"{written_value}: {target_name} expects {expected}{epochs_hint(value)}")
    return bound, problems


def _is_separate_key(name: str, target: Callable, named: Collection[str]) -> bool:
    """Is it a key of its own, and not a mistyped one of those that are known?"""
    return hasattr(target, name) or not get_close_matches(name, named, n=1, cutoff=_TYPO)


def _takes_kwargs(signature: inspect.Signature) -> bool:
    """Does it end with **kwargs?"""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def missing_arguments(target: Callable, present: Collection[str], where: str) -> list[str]:
    """One line for each parameter that has no default and is not present."""
    target_name = getattr(target, "__qualname__", repr(target))
    parameters = inspect.signature(target).parameters.items()
    required = [
        name
        for name, parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
    ]
    return [f"{where}.{name}: {target_name} needs it" for name in required if name not in present]


def parameter_types(target: Callable) -> dict[str, Any]:
    """The types of the parameters, as far as they can be known: names that only a type checker imports are left out."""
    function = inspect.unwrap(_constructor(target) if isinstance(target, type) else target)
    # a dataclass takes over its bases' fields as they are written there, in words of the bases' own files
    namespaces = (
        [vars(sys.modules[kind.__module__]) for kind in inspect.getmro(target)] if isinstance(target, type) else []
    )
    scope = dict(ChainMap(getattr(function, "__globals__", {}), *namespaces))
    types_by_name: dict[str, Any] = {}
    # One by one: typing.get_type_hints gives up on all of them where one name is not there at run time.
    for name, written in inspect.get_annotations(function).items():
        with suppress(NameError, TypeError, AttributeError, SyntaxError):
            types_by_name |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: written}), scope)
    return types_by_name


def _constructor(kind: type) -> Callable:
    return getattr(kind, "__init__")  # noqa: B009 - a type checker refuses to look at it through an instance's class


# What a configuration is for, from packages that were not written for this. torchvision's older transforms are plain
# classes, which is why their module is named; of data sets only those are here that hold what they are given.
NESTED_KINDS = (nn.Module, Task, Data, ParallelStyle)
NESTED_MODULES = ("torchvision.transforms.", "torch.utils.data.dataset", "trainer.learning.schedule", "recipes.")
REMOTE_MODULES = "torch.distributed.nn."  # networks that are made on other machines


def refuse_nested_target(target: Any, allowed: AllowedTargets, where: str) -> None:
    """Refuse what a node inside a group's may not call, though a configuration may name it.

    Of a lab everything may be called, of packages that the command line trusts every class, of others the classes of
    some kinds and records: a public class is not harmless for that. Making one of torch's may start a process
    (SubprocessHandler of torch.distributed.elastic) or write to a path (PackageExporter, SummaryWriter,
    every data set of torchvision's that downloads).
    """
    if allowed.from_lab(target):
        return
    kinds = f"{', '.join(kind.__name__ for kind in NESTED_KINDS)}, transform or dataclass"
    if not isinstance(target, type):
        remedy = f"a class may be that is a {kinds}, or a function of your lab that calls this one"
        raise Refusal(f"{where}: {qualified_name(target)} may not be called here: it is a function; {remedy}")
    of_kind = issubclass(target, NESTED_KINDS) and not target.__module__.startswith(REMOTE_MODULES)
    known = of_kind or target.__module__.startswith(NESTED_MODULES) or _is_record(target)
    if not known and not allowed.from_trusted_package(target):
        package = target.__module__.split(".")[0]
        remedy = f"if you know what it does, name its package on the command line: trust=[{package}]"
        why = f"it is no {kinds} that keeps to itself"
        raise Refusal(f"{where}: {qualified_name(target)} may not be called here: {why}; {remedy}")


def _is_record(kind: type) -> bool:
    """Does making one only keep what it is given?

    Dataclasses and named tuples have a constructor that Python wrote, and it stores, unless they say what comes after
    it. So do the configurations of transformers, which were neither before its version 5.
    """
    # its own, for a class that inherits may have any; and not one that it wrote itself
    constructor = getattr(vars(kind).get("__init__"), "__code__", None)
    is_dataclass = (
        "__dataclass_params__" in vars(kind) and constructor is not None and constructor.co_filename == "<string>"
    )
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_configuration = any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)
    return (is_dataclass and not hasattr(kind, "__post_init__")) or is_named_tuple or is_configuration
