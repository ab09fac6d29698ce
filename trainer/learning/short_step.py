"""The fused steps of SGD, Adam and AdamW, without most of what torch asks of each parameter in every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from operator import attrgetter, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Call = tuple[list[Tensor], list[dict[str, Tensor]]]  # the gradients and the states of a group's parameters, in order

# called by `map`, which takes a third of the time of a loop in Python
_gradient, _momentum, _is_there = attrgetter("grad"), itemgetter("momentum_buffer"), partial(is_not, None)


def make_step(kind: Any) -> Callable[..., Any]:
    """The method `step` of a class of optimizers: torch's own, without its compiler.

    That of SGD, Adam and AdamW calls the same functions of torch with what they need. Where a step is not as most of
    them (a first one, a parameter without a gradient, no fused step) it is torch's own.
    """
    whole = torch.no_grad()(unwrap(kind.step))
    update = _FUSED_UPDATES.get(kind)
    if update is None:
        return whole

    def step(self: Any, closure: Any = None) -> Any:
        calls: list[Any] = [_prepare(self, group) for group in self.param_groups]
        if closure is not None or None in calls:
            return whole(self, closure)
        # with fp16; else torch has set none
        scale = {"grad_scale": getattr(self, "grad_scale", None), "found_inf": getattr(self, "found_inf", None)}
        with torch.no_grad():
            for group, (gradients, states) in zip(self.param_groups, calls, strict=True):
                update(group, gradients, states, **scale)
        return None

    return step


def _prepare(optimizer: Optimizer, group: dict[str, Any]) -> Call | None:
    """What the step of this group needs; None: it is not as most of them."""
    # two passes of C over the parameters, where torch's own has one of Python
    gradients = [*map(_gradient, group["params"])]
    states = [*map(optimizer.state.__getitem__, group["params"])]
    is_usual = group["fused"] and all(map(_is_there, gradients)) and (all(states) or group.get("momentum") == 0)
    return (gradients, states) if is_usual else None


def _step_sgd(group: dict[str, Any], gradients: list[Tensor], states: list[Any], **scale: Any) -> None:
    sgd(
        group["params"],
        gradients,
        [*map(_momentum, states)] if group["momentum"] else [None] * len(states),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        fused=True,
        **scale,
    )


def _step_adam(group: dict[str, Any], gradients: list[Tensor], states: list[Any], **scale: Any) -> None:
    beta1, beta2 = group["betas"]
    adam(
        group["params"],
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        capturable=group["capturable"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        fused=True,
        **scale,
    )


_FUSED_UPDATES: dict[Any, Any] = {SGD: _step_sgd, Adam: _step_adam, AdamW: _step_adam}
