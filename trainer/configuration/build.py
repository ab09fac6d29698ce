"""From the nodes of a configuration to objects: the only place where a configuration calls anything.

Hydra's own `instantiate` is not used. It would look the name up again after it has been checked here, would call what
is nested without asking of which kind it is, and hides an error of the callee behind one of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.configuration import signature
from trainer.configuration.names import Names, real_name
from trainer.configuration.values import below, converted, describe, shown
from trainer.data.data import Data
from trainer.learning.task import Task
from trainer.refusal import Refusal

# What a data set's yaml says for models to interpolate. It is not passed to a Data that does not name it.
FACTS = ("num_classes", "channels", "image_size", "vocab_size")

# What may stand inside a node, from packages that were not written for this. torchvision's older transforms are plain
# classes, which is why their module is named.
INNER = (nn.Module, Task, Data, Dataset, ParallelStyle)
INNER_MODULES = ("torchvision.transforms.", "trainer.data.transforms", "trainer.learning.schedule", "recipes.")

# Functions of others that give a network and, in the versions that people have, do not say so.
FACTORIES = ("timm.models._factory.create_model",)


class Call(NamedTuple):
    """A call that has passed every check and has not been made."""

    target: Callable[..., Any]
    args: list[Any]  # nested nodes are Calls
    values: dict[str, Any]  # likewise
    written: Any  # the node before interpolation: what messages show
    where: str  # its place in the configuration
    partly: bool  # _partial_: hand over the target with these arguments instead of calling it


def build(node: DictConfig, kind: type, where: str, names: Names, **extra: Any) -> Any:
    """The object that a group's node describes, of this kind. `extra`: arguments that no configuration gives.

    Refusal where the name, the kind or an argument is wrong, before anything is called. What goes wrong inside the
    callee is its own error, with a note that says which part of the configuration it was built from.
    """
    call = _checked_group(node, kind, where, names, extra)
    made = _make(call, extra)
    if not _is_subclass(type(made), kind):
        raise Refusal(
            f"{where}: {real_name(call.target)} returned a {type(made).__name__}; {where} must be a {kind.__name__}"
        )
    return made


def check_all(cfg: DictConfig, kinds: Mapping[str, type], names: Names) -> None:
    """Refuse with everything that `build` would refuse in these groups, without calling anything."""
    problems = []
    for group, kind in kinds.items():
        try:
            _checked_group(cfg[group], kind, group, names, ["machine"] if group == "strategy" else [])
        except Refusal as refusal:
            problems.append(str(refusal))
    if problems:
        raise Refusal("\n".join(problems))


def maker(
    node: DictConfig, kind: type, where: str, names: Names, own: Iterable[str] = (), **extra: Any
) -> Callable[[Any], Any]:
    """What makes the object from its first argument alone: `maker(...)(groups)` is an optimizer over these groups.

    `own`: keys of the node that are the framework's and not the target's (config.OPTIMIZER_KEYS).
    """
    first = next(iter(_parameters(_group_target(node, kind, where, names))), "")
    call = _checked_group(node, kind, where, names, [first, *extra], own)

    def make(value: Any) -> Any:
        return _make(call, {first: value, **extra})

    if issubclass(kind, Optimizer):  # they check the range of their numbers when made: before any process group, then
        make([nn.Parameter(torch.zeros(2, 2))])
    return make


# --------------------------------------------------------------------------------------------------------------- check


def _checked_group(
    node: DictConfig, kind: type, where: str, names: Names, given: Iterable[str], own: Iterable[str] = ()
) -> Call:
    target = _group_target(node, kind, where, names)
    values, written = OmegaConf.to_container(node, resolve=True), OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    # Keys that are in the node for others: facts for models, and what is the framework's own.
    left_out = set(own) | ({name for name in FACTS if name not in _parameters(target)} if kind is Data else set())
    kept = {str(name): value for name, value in values.items() if name not in left_out}
    return _checked(target, kept, written, where, names, given)


def _group_target(node: DictConfig, kind: type, where: str, names: Names) -> Callable[..., Any]:
    if "_target_" not in node:
        raise Refusal(f"{where}: its yaml must say what to build: _target_: package.module.Name")
    target = names.find(node["_target_"], f"{where}._target_")
    _refuse_other_kind(target, kind, where, names)
    return target


def _refuse_other_kind(target: Any, kind: type, where: str, names: Names) -> None:
    """Refuse a class that is not of the kind, and a function that does not say that it gives one.

    A function of the lab may leave out to say that it gives a network: many factories do.
    """
    name, wanted = real_name(target), kind.__name__
    if isinstance(target, type):
        if not _is_subclass(target, kind):
            raise Refusal(f"{where}: {name} is not a {wanted}; {where} must be one")
        if inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            raise Refusal(f"{where}: {name} is abstract; a class of its own must define {missing}")
        return
    gives = signature.hints(target).get("return")
    if isinstance(gives, type) and _is_subclass(gives, kind):
        return
    if gives is None:
        if kind is nn.Module and (names.beside(target) or name in FACTORIES):
            return
        raise Refusal(
            f"{where}: {name} is a function that does not say what it returns; write -> {wanted} behind its parameters"
        )
    raise Refusal(f"{where}: {name} returns {describe(gives)}; {where} must be a {wanted}")


def _is_subclass(target: type, kind: type) -> bool:
    """Is it the kind's subclass, or, where the kind is a protocol, does it have all that the protocol asks for?"""
    if not getattr(kind, "_is_protocol", False):
        return issubclass(target, kind)
    asked = [name for owner in kind.__mro__ if getattr(owner, "_is_protocol", False) for name in vars(owner)]
    return all(hasattr(target, name) for name in asked if not name.startswith("_"))


def _checked(
    target: Any, values: Mapping[str, Any], written: Any, where: str, names: Names, given: Iterable[str]
) -> Call:
    """A call of this target, with everything nested in it checked too."""
    words = {name: value for name, value in values.items() if not name.startswith("_")}
    for name in values.keys() - words.keys() - {"_target_"}:
        _refuse_special(name, values[name], where)

    # What is nested comes first: whether it may be called at all matters more than whether its holder takes it.
    inner = {name: _inner(value, below(written, name), f"{where}.{name}", names) for name, value in words.items()}
    args = _inner(values.get("_args_", []), below(written, "_args_") if "_args_" in values else [], where, names)

    # Arguments by position fill the first parameters; a partial call may leave any open.
    taken = list(_parameters(target))[: len(args)]
    partly = values.get("_partial_", False)
    found = signature.problems(target, words, written, where, [*given, *taken])
    if partly:
        found = [line for line in found if not line.endswith(" needs it")]
    if found:
        raise Refusal("\n".join(found))
    return Call(target, args, inner, written, where, partly)


# What Hydra knows besides _target_ and _args_, with the values that mean something here: lists and dicts are always
# plain ones, and what is nested is always built.
_SPECIAL: dict[str, tuple[Any, ...]] = {"_partial_": (True, False), "_convert_": ("all",), "_recursive_": (True,)}


def _refuse_special(name: str, value: Any, where: str) -> None:
    if value in _SPECIAL.get(name, ()) or (name == "_args_" and isinstance(value, list)):
        return
    raise Refusal(
        f"{where}.{name}={shown(value)}: only _target_, _args_ (a list) and _partial_ (true or false) mean something"
    )


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(target).parameters


def _inner(value: Any, written: Any, where: str, names: Names) -> Any:
    """The value with every node in it as the Call that it means."""
    if isinstance(value, dict) and "_target_" in value:
        return _nested(value, written, where, names)
    if isinstance(value, dict):
        return {key: _inner(item, below(written, key), f"{where}.{key}", names) for key, item in value.items()}
    if isinstance(value, list):
        return [_inner(item, below(written, at), f"{where}.{at}", names) for at, item in enumerate(value)]
    return value


def _nested(value: Mapping[str, Any], written: Any, where: str, names: Names) -> Call:
    """The call of a node inside a group's. Of other people's packages only some kinds may stand there."""
    target = names.find(value["_target_"], f"{where}._target_")
    known = isinstance(target, type) and (issubclass(target, INNER) or target.__module__.startswith(INNER_MODULES))
    if not known and not names.beside(target) and not (isinstance(target, type) and names.trusted(target)):
        kinds = ", ".join(kind.__name__ for kind in INNER)
        raise Refusal(f"{where}: {real_name(target)} may not be called here: it is not a {kinds} or transform")
    return _checked(target, value, written, where, names, ())


# ---------------------------------------------------------------------------------------------------------------- make


def _make(call: Call, extra: Mapping[str, Any]) -> Any:
    """Make the call, from the innermost node outwards."""
    hints = signature.hints(call.target)
    positions = [*_parameters(call.target), *[""] * len(call.args)]  # *args has one name for many
    args = [converted(_made(value), hints.get(name)) for name, value in zip(positions, call.args, strict=False)]
    values = {name: converted(_made(value), hints.get(name)) for name, value in call.values.items()}
    if call.partly:
        return partial(call.target, *args, **values, **extra)
    try:
        return call.target(*args, **values, **extra)
    except Refusal:
        raise
    except Exception as error:
        _refuse_values(error, call)
        error.add_note(f"while building {call.where} from the configuration: {real_name(call.target)}")
        raise


def _made(value: Any) -> Any:
    if isinstance(value, Call):
        return _make(value, {})
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    return [_made(item) for item in value] if isinstance(value, list) else value


def _refuse_values(error: Exception, call: Call) -> None:
    """What a constructor says against its keys and values is the configuration's fault; other errors are its own."""
    # A signature with **kwargs hides which keys are taken: the callee finds out.
    for name in call.values:
        if isinstance(error, TypeError) and f"unexpected keyword argument '{name}'" in str(error):
            raise Refusal(f"{call.where}.{name}: {real_name(call.target)} takes no such key") from error
    if call.values and isinstance(error, ValueError | RuntimeError | AssertionError | ArithmeticError):
        plain = [name for name, value in call.values.items() if not isinstance(value, dict | Call)]
        given = ", ".join(f"{name}={shown(below(call.written, name))}" for name in plain)
        reason = str(error).strip() or type(error).__name__
        raise Refusal(f"{call.where}: {real_name(call.target)} cannot be built with {given}: {reason}") from error
