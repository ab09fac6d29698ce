"""What an optimizer remembers as named tensors, and back: tensors and numbers of a parameter, and of its group.

`{"steps": 3}` becomes `steps=int`; what the steps have changed in a group is `param_groups{steps}=int`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Leaves = Mapping[str, Tensor]  # of one parameter
_GROUP, _GROUP_END = "param_groups{", "}"  # around the names of what an optimizer keeps in the group of a parameter
_BY_COLUMNS = "^T"  # behind names of older versions: of matrices whose columns lay in order
_SETTINGS = "settings_at_first"  # the attribute of an optimizer in which `note_settings` keeps them
_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_NOT_ITS_OWN = ("params", "lr")  # of a group: the schedule sets the rate in every step


def note_settings(optimizer: Optimizer) -> Optimizer:
    """The same new optimizer. What its steps change in its groups is known from now on, and is no configuration."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    vars(optimizer)[_SETTINGS] = deepcopy(kept)
    return optimizer


def optimizer_leaves(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """By parameter all that a checkpoint must hold. TypeError where something is neither a tensor nor a number.

    A number of a group is there for each of its parameters: another strategy has other groups.
    """
    leaves: dict[Tensor, dict[str, Tensor]] = {}
    for parameter, memory in optimizer.state.items():
        if any(value is not None for value in memory.values()):  # nothing but None: SGD without momentum
            leaves[parameter] = dict(_leaf(key, value) for key, value in memory.items())
    # a rank may have other groups than the one that reads this, so the group's numbers go with its parameters
    for group, settings in zip(optimizer.param_groups, vars(optimizer).get(_SETTINGS, ()), strict=False):
        kept = {key: x for key, x in group.items() if key not in _NOT_ITS_OWN}
        changed = {key: x for key, x in kept.items() if key not in settings or _differ(x, settings[key])}
        for parameter in group["params"] if changed else ():
            leaves.setdefault(parameter, {}).update(_leaf(key, x, in_group=True) for key, x in changed.items())
    return leaves


def load_leaves(optimizer: Optimizer, leaves: Mapping[Tensor, Leaves]) -> None:
    """Take over what an optimizer remembered. Its hyper-parameters stay those of the present configuration."""
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    states: dict[int, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            for name, x in leaves.get(parameter, {}).items():
                key, _, kind = name.partition("=")
                value = None if kind == "None" else x.item() if kind else x
                if key.startswith(_GROUP):
                    on_device = value.to(parameter.device) if isinstance(value, Tensor) else value
                    saved[key.removeprefix(_GROUP).removesuffix(_GROUP_END)] = on_device
                else:
                    states.setdefault(index, {})[key.removesuffix(_BY_COLUMNS)] = value
    # it puts step counts where this optimizer wants them (the device if it is fused, else the CPU)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    # but whatever else it takes for numbers of the parameter's type
    for index, memory in states.items():
        loaded = optimizer.state[ordered[index]]
        for key, value in memory.items():
            if key != "step" and isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.to(loaded[key].device)


def is_plain(name: str) -> bool:
    """Is a leaf of this name no tensor that could be sharded, but a number, nothing, or something of a group?"""
    return "=" in name or name.startswith(_GROUP)


def _leaf(key: str, value: Any, in_group: bool = False) -> tuple[str, Tensor]:
    kind, name = type(value).__name__, f"{_GROUP}{key}{_GROUP_END}" if in_group else key
    if isinstance(value, Tensor):
        return name, value
    if value is None:
        return f"{name}=None", torch.empty(0)
    if kind in _NUMBERS:
        return f"{name}={kind}", torch.tensor(value, dtype=_NUMBERS[kind])
    raise TypeError(f"{key!r} as {kind}{' in a group' if in_group else ''}")


def _differ(value: Any, first: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(first, Tensor):
        return not torch.equal(value, first.to(value.device))
    # of another type is another value: 1 and True, a number and a tensor
    return type(value) is not type(first) or bool(value != first)
