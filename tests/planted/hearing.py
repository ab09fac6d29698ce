"""A schedule that hears, and an optimizer that looks at shards: each with a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer import Schedule


class Hearing(Schedule):
    """It counts evaluations, where no checkpoint keeps it."""

    heard = 0

    def at(self, step: int, epoch: int, progress: float) -> float:
        return 0.5**self.heard

    def observe(self, metrics: Mapping[str, float], best: str) -> None:
        self.heard += 1


class Noisy(torch.optim.SGD):
    """It adds noise to what it steps, as Langevin dynamics does; ranks that step others draw other noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


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
