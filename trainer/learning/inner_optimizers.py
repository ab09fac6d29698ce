"""An optimizer around others, Muon and AdamW in one class for example: what they remember, and their rates, are its."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.refusal import Refusal

EMPTY = "empty parameter list"  # what torch says of an optimizer that gets nothing


def made_for_trial(make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """An optimizer over a matrix, which all of them take; and over a vector, where one inside of it wants the rest."""
    numbers = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    try:
        return make(numbers[:1])
    except (ValueError, Refusal) as error:
        if EMPTY not in str(error):
            raise
    return make(numbers)


def exposed(optimizer: Optimizer) -> Optimizer:
    """The same optimizer. Where others lie in it that step all its parameters, their groups and states are its own.

    So the schedule reaches them and a checkpoint holds what they remember.
    """
    inner = list(_inside(vars(optimizer).values()))
    steps = [parameter for each in inner for group in each.param_groups for parameter in group["params"]]
    all_of_it = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not inner or len(steps) != len(all_of_it) or {*steps} != all_of_it:
        return optimizer  # what is wrong with it shows when it is tried
    optimizer.param_groups = [group for each in inner for group in each.param_groups]
    for each in inner:
        optimizer.state.update(each.state)
    share = partial(_share, inner)
    optimizer.register_load_state_dict_post_hook(share)  # which makes new groups and a new state
    share(optimizer)
    return optimizer


def _share(inner: Sequence[Optimizer], optimizer: Optimizer) -> None:
    groups = iter(optimizer.param_groups)
    for each in inner:
        each.state = optimizer.state
        each.param_groups = list(islice(groups, len(each.param_groups)))


def _inside(values: Any) -> Iterator[Optimizer]:
    for value in values:
        if isinstance(value, Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inside(value)
        elif type(value) is dict:
            yield from _inside(value.values())
