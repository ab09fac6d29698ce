"""What an optimizer remembers as named tensors, and back: also lists of tensors, numbers, and numbers in its groups.

`{"GG": [x, y], "steps": 3}` becomes `GG[0]`, `GG[1]` and `steps=int`. An item of a tuple is `(0)`, of a dict `{key}`.
`Q^T` is a matrix whose columns lie in order: resumed with rows in order, its products would be rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.data.nested_tensors import map_tensors

Leaves = Mapping[str, Tensor]  # of one parameter
GROUP = "param_groups"  # stands before the names of what an optimizer keeps in the group of a parameter
_SETTINGS = "settings_at_first"  # the attribute of an optimizer in which `note_settings` keeps them
_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
_ENDS = dict(_BRACKETS.values())
_MARKS = {*"[](){}=/^"}
_COLUMNS = "^T"
_NOT_ITS_OWN = ("params", "lr")  # of a group: the schedule sets the rate in every step


def note_settings(optimizer: Optimizer) -> Optimizer:
    """The same new optimizer. What its steps change in its groups is known from now on, and is no configuration."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    vars(optimizer)[_SETTINGS] = deepcopy(kept)
    return optimizer


def optimizer_leaves(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """By parameter all that a checkpoint must hold. TypeError where something cannot become tensors.

    A number of a group is there for each of its parameters: another strategy has other groups.
    """
    leaves: dict[Tensor, dict[str, Tensor]] = {}
    # name → tensor; what is no tensor becomes one
    for parameter, memory in optimizer.state.items():
        if any(value is not None for value in memory.values()):  # nothing but None: SGD without momentum
            flat = [leaf for key, value in memory.items() for leaf in _flatten(key, value)]
            leaves[parameter] = {f"{name}{_COLUMNS}" if _by_columns(x, parameter) else name: x for name, x in flat}
    # a rank may have other groups than the one that reads this, so the group's numbers go with its parameters
    for group, settings in zip(optimizer.param_groups, vars(optimizer).get(_SETTINGS, ()), strict=False):
        kept = {key: x for key, x in group.items() if key not in _NOT_ITS_OWN}
        changed = {key: x for key, x in kept.items() if key not in settings or _differ(x, settings[key])}
        for parameter in group["params"] if changed else ():
            leaves.setdefault(parameter, {}).update(_flatten(GROUP, changed))
    return leaves


def load_leaves(optimizer: Optimizer, leaves: Mapping[Tensor, Leaves]) -> None:
    """Take over what an optimizer remembered. Its hyper-parameters stay those of the present configuration."""
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memories = {parameter: _assemble(leaves[parameter]) for parameter in ordered if parameter in leaves}
    groups = optimizer.state_dict()["param_groups"]
    at_first = vars(optimizer).get(_SETTINGS, [{}] * len(groups))
    for group, saved, settings in zip(optimizer.param_groups, groups, at_first, strict=True):
        # what this one's own steps have left there, before the run went back to a checkpoint, is forgotten
        for key in saved.keys() - {*_NOT_ITS_OWN}:
            saved[key] = deepcopy(settings.get(key, saved[key]))
        for parameter in group["params"]:
            numbers, device = memories.get(parameter, {}).pop(GROUP, {}), parameter.device
            saved.update(map_tensors(numbers, partial(Tensor.to, device=device)))
    states = {index: memories[p] for index, p in enumerate(ordered) if memories.get(p)}
    # it puts step counts where this optimizer wants them (the device if it is fused, else the CPU)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    # but whatever else it takes for numbers of the parameter's type
    for index, memory in states.items():
        loaded = optimizer.state[ordered[index]]
        loaded.update({key: _keep_type(value, loaded[key]) for key, value in memory.items() if key != "step"})


def is_plain(name: str) -> bool:
    """Is a leaf of this name no tensor that could be sharded, but a number, nothing, or something of a group?"""
    return "=" in name or name.startswith(GROUP) or name.endswith(("[]", "()", "{}"))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    kind = type(value)
    if isinstance(value, Tensor):
        yield name, value
    elif value is None:
        yield f"{name}=None", torch.empty(0)
    elif kind.__name__ in _NUMBERS:
        yield f"{name}={kind.__name__}", torch.tensor(value, dtype=_NUMBERS[kind.__name__])
    elif kind is str:
        yield f"{name}=str", torch.tensor([*value.encode()], dtype=torch.uint8)
    elif kind in _BRACKETS:
        begin, end = _BRACKETS[kind]
        for key, item in value.items() if kind is dict else enumerate(value):
            if kind is dict and not (isinstance(key, str) and _MARKS.isdisjoint(key)):
                raise TypeError(f"{name} with the key {key!r}")
            yield from _flatten(f"{name}{begin}{key}{end}", item)
        if not value:
            yield f"{name}{begin}{end}", torch.empty(0)
    else:
        raise TypeError(f"{name} as {kind.__name__}")


def _by_columns(x: Tensor, parameter: Tensor) -> bool:
    # what lies as its parameter does is made like it, whoever reads it
    return x.dim() == 2 and not x.is_contiguous() and x.T.is_contiguous() and x.stride() != parameter.stride()


def _assemble(leaves: Leaves) -> dict[str, Any]:
    """The dict of which `_flatten` has made these."""
    # by key, the leaves below it, each by what follows the key in its name
    rests: dict[str, dict[str, Tensor]] = {}
    for name, x in leaves.items():
        # an underscore or a dot may be part of a key, these marks are not
        at = min((place for mark in "[({=^" if (place := name.find(mark)) >= 0), default=len(name))
        rests.setdefault(name[:at], {})[name[at:]] = x
    return {key: _value(named) for key, named in rests.items()}


def _value(rests: Leaves) -> Any:
    """The value whose leaves have these ends of names."""
    first, x = next(iter(rests.items()))
    if not first:
        return x
    if first == _COLUMNS:
        return x.T.contiguous().T
    if first == "=str":
        return bytes(x.tolist()).decode()
    if first[0] == "=":
        return None if first == "=None" else x.item()
    end = _ENDS[first[0]]
    # a list, tuple or dict: the same one level deeper
    inside: dict[str, dict[str, Tensor]] = {}
    for rest, leaf in rests.items():
        key, _, deeper = rest[1:].partition(end)
        inside.setdefault(key, {})[deeper] = leaf
    inside.pop("", None)  # it is empty
    if end == "}":
        return {key: _value(named) for key, named in inside.items()}
    items = [_value(inside[str(index)]) for index in range(len(inside))]
    return items if end == "]" else tuple(items)


def _differ(value: Any, first: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(first, Tensor):
        return not torch.equal(value, first.to(value.device))
    # of another type is another value: 1 and True, a number and a tensor
    if type(value) is type(first) and isinstance(value, list | tuple):
        return len(value) != len(first) or any(map(_differ, value, first))
    return type(value) is not type(first) or bool(value != first)


def _keep_type(value: Any, loaded: Any) -> Any:
    """A value as it was saved, on the device to which it was loaded."""
    if isinstance(value, Tensor):
        return loaded if value.dtype == loaded.dtype else value.to(loaded.device)
    # what holds no tensors is as it was: torch makes something else of a text
    if type(value) is dict:
        return {key: _keep_type(item, loaded[key]) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_keep_type, value, loaded))
    return value
