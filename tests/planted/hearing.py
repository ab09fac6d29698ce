"""Schedules, optimizers, orders and tasks that are less common, most of them with a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.planted.users import SAMPLES, Classes, Numbers
from trainer import Schedule


class Hearing(Schedule):
    """It counts evaluations, where no checkpoint keeps it."""

    heard = 0

    def at(self, step: int, epoch: int, progress: float) -> float:
        return 0.5**self.heard

    def observe(self, metrics: Mapping[str, float], best: str) -> None:
        self.heard += 1


class ByShard(torch.optim.SGD):
    """It divides each gradient by its norm, which it takes of what the rank holds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                held, gradient = (
                    one.to_local() if isinstance(one, DTensor) else one for one in (parameter, parameter.grad)
                )
                held.sub_(gradient / (gradient.norm() + 1e-6), alpha=group["lr"])


class GlobalOrder(Numbers):
    """An order that ignores its generator."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(SAMPLES)


class MixedByTask(Classes):
    """It mixes each sample with another one of its micro-batch before the network sees it."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        return network(0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))])
