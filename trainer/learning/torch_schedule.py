"""Schedules of torch.optim.lr_scheduler: each gives the rates that it gives in a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.learning.schedule import Schedule
from trainer.refusal import Refusal


@dataclass(kw_only=True)
class TorchSchedule(Schedule):
    """A scheduler of torch's over an optimizer that only has a rate, stepped once an epoch or once a step.

    It is stepped again from the start where a run goes on: nothing has to be stored, and any scheduler can be had.
    """

    make: Callable[[Optimizer], LRScheduler]
    rate: float  # of the run's optimizer: what numbers like eta_min and max_lr are to be compared with
    per: Literal["step", "epoch"] = "epoch"  # how often it is stepped
    needs_horizon: ClassVar[bool] = False  # how long it takes, its own keys say

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stepped: int = 0  # so often by now
        self._begin()
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise Refusal("schedule._target_: ReduceLROnPlateau needs a metric; use schedule=plateau")
        if self._optimizer.param_groups[0]["momentum"]:
            raise Refusal(
                f"schedule: {self._kind} changes the momentum too; here it stays as the optimizer has it: add"
                " +schedule.cycle_momentum=false"
            )

    @property
    def label(self) -> str:
        """Which one, and how often it is stepped."""
        return f"{self._kind}, once {'an' if self.per == 'epoch' else 'a'} {self.per}"

    def check(self, steps: int, per_epoch: int) -> None:
        """Refuse a run that is longer than the scheduler."""
        needed = steps if self.per == "step" else -(-steps // per_epoch)
        total = getattr(self._scheduler, "total_steps", needed)  # OneCycleLR fails behind its end
        if needed > total:
            raise Refusal(
                f"schedule: {self._kind} ends after {total:,} and is stepped once {self.label.split('once ')[1]}, of"
                f" which this run has {needed:,}; give it schedule.total_steps={needed}"
            )

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        """The factor for this step; in the warm-up a growing part of what the scheduler says."""
        return min((step + 1) / max(self.warmup, 1), 1.0) * self.at(step, epoch, 1.0)

    def at(self, step: int, epoch: int, done: float) -> float:
        """What the scheduler says, as a part of the optimizer's rate."""
        wanted = step if self.per == "step" else epoch
        if wanted < self._stepped:
            self._begin()
        for _ in range(self._stepped, wanted):
            self._scheduler.step()
        self._stepped = wanted
        return self._optimizer.param_groups[0]["lr"] / (self.rate or 1.0)

    def _begin(self) -> None:
        # no momentum: one that cycles it shows
        self._optimizer = torch.optim.SGD([torch.zeros(())], lr=self.rate, momentum=0.0)
        self._scheduler, self._stepped = self.make(self._optimizer), 0
        self._optimizer.step()  # or torch would remark that schedulers are stepped behind optimizers

    @property
    def _kind(self) -> str:
        return type(self._scheduler).__name__
