"""From the nodes of a configuration to objects: the only place where a configuration calls anything.

Hydra's own `instantiate` is not used. It would look the name up again after it has been checked here, would call what
is nested without asking of which kind it is, and hides an error of the callee behind one of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_tb
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from trainer.configuration import allowed_targets
from trainer.configuration.allowed_targets import AllowedTargets, qualified_name, refuse_nested_target
from trainer.configuration.interpolation import flatten_unresolved, format_override
from trainer.configuration.schema import RESERVED_KEYS
from trainer.data.data import Data
from trainer.learning.optimizer import make_trial_optimizer, without_compiler
from trainer.messages import Refusal, join_problems

# What a data set's yaml says for models to interpolate. It is not passed to a Data that does not name it.
DATA_FACTS = ("num_classes", "channels", "image_size", "vocab_size", "bytes_per_token", "ignored")

_PLAIN = (bool, int, float, str, list, tuple, type(None))  # of others nobody knows what == gives


@dataclass(frozen=True)
class PlannedCall:
    """A call that has passed every check and has not been made."""

    target: Callable[..., Any]
    args: list[Any]  # nested nodes are Calls
    values: dict[str, Any]  # likewise
    shown_arguments: list[str]  # the plain ones of them as they were written: what messages show
    where: str  # its place in the configuration


def fill_data_facts(cfg: DictConfig, known: Mapping[str, Any]) -> DictConfig:
    """The configuration with these values for the facts that its data leaves open (null); others stay as they are."""
    missing_facts = {name: known.get(name) for name in DATA_FACTS if name in cfg.data and cfg.data[name] is None}
    return OmegaConf.merge(cfg, {"data": missing_facts}) if missing_facts else cfg  # type: ignore[return-value]


def instantiate(node: DictConfig | None, kind: type, where: str, allowed: AllowedTargets, **extra: Any) -> Any:
    """The object that a group's node describes, of this kind. `extra`: arguments that no configuration gives.

    Refusal where the name, the kind or an argument is wrong, before anything is called. What goes wrong inside the
    callee is its own error, with a note that says which part of the configuration it was built from.
    """
    if node is None:
        group = where.partition(".")[0]
        raise Refusal(f"{where}=null: nothing can be built of it; {group}=[…] or {group}=… says which there are")
    call = _plan_group(node, kind, where, allowed, extra)
    built = _execute(call, extra)
    # once more, of the object: a function may promise one thing and return another
    if not isinstance(built, kind):
        raise Refusal(
            f"{where}: {qualified_name(call.target)} returned a {type(built).__name__};"
            f" {where} must be a {kind.__name__}"
        )
    return built


def check_groups(cfg: DictConfig, kinds: Mapping[str, type], allowed: AllowedTargets) -> set[str]:
    """Refuse with everything that `instantiate` would refuse in these groups, without calling anything.

    Returns the keys that change nothing: what they say, the target says by itself. One that a later version of it
    brings is no other configuration.
    """
    problems: list[str] = []
    reserved = {f"{group}.{key}": value for group, defaults in RESERVED_KEYS.items() for key, value in defaults.items()}
    unchanged = {path for path, value in reserved.items() if OmegaConf.select(cfg, path) == value}
    for group, kind in kinds.items():
        try:
            given = ["machine"] if group == "strategy" else []
            unchanged |= set(_default_keys(_plan_group(cfg[group], kind, group, allowed, given)))
        except Refusal as refusal:
            problems.append(str(refusal))
    if problems:
        raise Refusal("\n".join(problems))
    # what a task is told of the data follows from the data's own keys
    return unchanged | {f"task.{fact}" for fact in DATA_FACTS}


def make_factory(
    node: DictConfig, kind: type, where: str, allowed: AllowedTargets, **extra: Any
) -> Callable[[Any], Any]:
    """Makes the object from its first argument alone: `make_factory(...)(groups)` is an optimizer over these groups."""
    # The first argument is not there yet; everything else is checked now, before any process group.
    first = next(iter(inspect.signature(_group_target(node, kind, where, allowed)).parameters), "")
    call = _plan_group(node, kind, where, allowed, [first, *extra])
    if issubclass(kind, Optimizer):
        call = replace(call, target=without_compiler(call.target))

    def make(value: Any) -> Any:
        return _execute(call, {first: value, **extra})

    if issubclass(kind, Optimizer):  # they check the range of their numbers when they are made
        make_trial_optimizer(make)
    return make


# --------------------------------------------------------------------------------------------------------------- check


def _plan_group(
    node: DictConfig, kind: type, where: str, allowed: AllowedTargets, given: Collection[str]
) -> PlannedCall:
    target = _group_target(node, kind, where, allowed)
    values: Any = OmegaConf.to_container(node, resolve=True)
    # Keys that are in the node for others: facts for models, and what is the framework's own.
    reserved, parameters = RESERVED_KEYS.get(where, {}), inspect.signature(target).parameters
    clashes = (
        reserved.keys() & parameters.keys() if kind is nn.Module else ()
    )  # an optimizer's own `fused` is what ours means
    for name in clashes:
        raise Refusal(
            f"{where}.{name} is a key of the framework's own, and {qualified_name(target)} has a parameter of that"
            " name, which no configuration could give; it needs another name"
        )
    left_out = {*reserved, *(set(DATA_FACTS) - parameters.keys() if kind is Data else ())}
    arguments = {str(name): value for name, value in values.items() if name not in left_out}
    return _Planner(allowed, flatten_unresolved(node, f"{where}.")).plan_call(target, arguments, where, given)


def _group_target(node: DictConfig, kind: type, where: str, allowed: AllowedTargets) -> Callable[..., Any]:
    """What the node names. Refusal for a class of another kind, or a function that does not say that it gives one."""
    if "_target_" not in node:
        raise Refusal(f"{where}: its yaml must say what to build: _target_: package.module.Name")
    target: Any = allowed.import_target(node["_target_"], f"{where}._target_")
    name, wanted = qualified_name(target), kind.__name__
    if isinstance(target, type):
        if not issubclass(target, kind):
            raise Refusal(f"{where}: {name} is not a {wanted}; {where} must be one")
        if inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            raise Refusal(f"{where}: {name} is abstract; a class of its own must define {missing}")
        return target
    gives = allowed_targets.parameter_types(target).get("return")
    # A function of the lab may leave out to say that it gives a network: many factories do.
    if gives is None and not (kind is nn.Module and allowed.from_lab(target)):
        raise Refusal(
            f"{where}: {name} is a function that does not say what it returns; write -> {wanted} behind its parameters"
        )
    if gives is not None and not (isinstance(gives, type) and issubclass(gives, kind)):
        raise Refusal(f"{where}: {name} returns {getattr(gives, '__name__', gives)}; {where} must be a {wanted}")
    return target


def _default_keys(call: PlannedCall) -> Iterator[str]:
    parameters = inspect.signature(call.target).parameters if call.target is not partial else {}
    for name, value in call.values.items():
        if isinstance(value, PlannedCall):
            yield from _default_keys(value)
        elif name in parameters and isinstance(value, _PLAIN) and value == parameters[name].default:
            yield f"{call.where}.{name}"


@dataclass(frozen=True)
class _Planner:
    """A group's node and what is nested in it, held against what may be called and what that takes."""

    allowed: AllowedTargets
    written: Mapping[str, Any]  # everything in the node by its path, before interpolation

    def plan_call(self, target: Any, values: Mapping[str, Any], where: str, given: Collection[str] = ()) -> PlannedCall:
        """A call of this target, with everything nested in it checked too."""
        arguments = {name: value for name, value in values.items() if not name.startswith("_")}
        args, partly = values.get("_args_", []), values.get("_partial_", False)
        special = values.keys() - arguments.keys() - {"_target_", "_args_", "_partial_"}
        if special or not isinstance(args, list) or not isinstance(partly, bool):
            raise Refusal(f"{where}: only _target_, _args_ (a list) and _partial_ (true or false) may begin with _")
        bound, problems = allowed_targets.bind_arguments(target, arguments, self.written, where, given)

        # Arguments by position fill the first parameters; a partial call may leave any open.
        if not partly:
            first = list(inspect.signature(target).parameters)[: len(args)]
            problems += allowed_targets.missing_arguments(target, {*arguments, *given, *first}, where)
        if problems:
            raise Refusal(join_problems(problems))
        args = self.plan_nested(args, f"{where}._args_")
        plain = [name for name, value in arguments.items() if not isinstance(value, dict)]
        shown = [format_override(self.written, f"{where}.{name}").removeprefix(f"{where}.") for name in plain]
        nested = {name: self.plan_nested(value, f"{where}.{name}") for name, value in bound.items()}
        if partly:
            target, args = partial, [target, *args]
        return PlannedCall(target, args, nested, shown, where)

    def plan_nested(self, value: Any, where: str) -> Any:
        """The value with every node in it as the Call that it means."""
        if isinstance(value, dict) and "_target_" in value:
            return self.plan_node(value, where)
        if isinstance(value, dict):
            return {key: self.plan_nested(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.plan_nested(item, f"{where}.{at}") for at, item in enumerate(value))
        return value

    def plan_node(self, value: Mapping[str, Any], where: str) -> PlannedCall:
        """The call of a node inside a group's."""
        target = self.allowed.import_target(value["_target_"], f"{where}._target_")
        refuse_nested_target(target, self.allowed, where)
        return self.plan_call(target, value, where)


# ---------------------------------------------------------------------------------------------------------------- make


def _execute(call: PlannedCall, extra: Mapping[str, Any]) -> Any:
    """Make the call, from the innermost node outwards."""
    args, values = _execute_nested(call.args), _execute_nested(call.values)
    try:
        return call.target(*args, **values, **extra)
    except Refusal:
        raise
    except Exception as error:
        _refuse_rejected_values(error, call)
        error.add_note(f"while building {call.where} from the configuration: {qualified_name(call.target)}")
        raise


def _execute_nested(value: Any) -> Any:
    if isinstance(value, PlannedCall):
        return _execute(value, {})
    if isinstance(value, dict):
        return {key: _execute_nested(item) for key, item in value.items()}
    return type(value)(_execute_nested(item) for item in value) if isinstance(value, list | tuple) else value


def _refuse_rejected_values(error: Exception, call: PlannedCall) -> None:
    """What a constructor says against its keys and values is the configuration's fault; other errors are its own."""
    # A signature with **kwargs hides which keys are taken: the callee finds out.
    # One that it names, and hands on to somebody who does not take it, is a mistake in its own code.
    for name in call.values:
        untaken = isinstance(error, TypeError) and f"unexpected keyword argument '{name}'" in str(error)
        if untaken and name not in inspect.signature(call.target).parameters:
            raise Refusal(f"{call.where}.{name}: {qualified_name(call.target)} takes no such key") from error
    if call.values and isinstance(error, ValueError | RuntimeError | AssertionError | ArithmeticError):
        reason = str(error).strip() or type(error).__name__
        given = ", ".join(call.shown_arguments)
        # a lab's own code may be what is wrong, and not the values: its innermost line
        own = [
            f" ({frame.f_code.co_filename}, line {line})"
            for frame, line in walk_tb(error.__traceback__)
            if allowed_targets.is_own_code(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
        ]
        place = own[-1] if own else ""
        raise Refusal(
            f"{call.where}: {qualified_name(call.target)} cannot be built with {given}: {reason}{place}"
        ) from error
