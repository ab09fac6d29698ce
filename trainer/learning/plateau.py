"""A learning rate that falls when a figure has stopped getting better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer.learning.schedule import Schedule
from trainer.refusal import Refusal

COUNTS = ("best", "num_bad_epochs", "cooldown_counter")  # what torch's scheduler remembers between two figures


@dataclass
class Plateau(Schedule):
    """The rate times `factor` when more than `patience` evaluations in a row have brought no better figure.

    torch.optim.lr_scheduler.ReduceLROnPlateau does the counting; its epochs are evaluations here.
    """

    figure: str | None = None  # accuracy, or -loss: smaller is better; None: the one that marks the best checkpoint
    factor: float = 0.1
    patience: int = 10  # evaluations
    threshold: float = 1e-4  # better by this part of the best figure, or it does not count
    cooldown: int = 0  # evaluations after a fall that do not count
    min: float = 0.0  # part of the full rate, 0..1, below which it does not fall
    needs_horizon: ClassVar[bool] = False
    needs_figures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.factor < 1:
            raise Refusal(f"schedule.factor is {self.factor}; the rate is multiplied by it, between 0 and 1")
        if self.patience < 0 or self.cooldown < 0:
            wrong = "patience" if self.patience < 0 else "cooldown"
            raise Refusal(f"schedule.{wrong} is {getattr(self, wrong)}; it counts evaluations, 0 or more")
        if not 0 <= self.min <= 1 or self.threshold < 0:
            raise Refusal(f"schedule.min is {self.min}, schedule.threshold {self.threshold}: fractions, 0 or more")
        self._rate = 1.0  # part of the full rate
        self._counts: dict[str, float] = {}
        self._heard: str | None = None  # the figure that they are about

    def at(self, step: int, epoch: int, done: float) -> float:
        """The factor that the figures so far have come to."""
        return self._rate

    @property
    def follows(self) -> Mapping[str, str]:
        """The figure, where it is not the one that marks the best checkpoint."""
        return {"schedule.figure": self.figure} if self.figure else {}

    def hear(self, figures: Mapping[str, float], best: str) -> None:
        """Count one evaluation, and let the rate fall where there were too many."""
        name = self.figure or best
        mode: Literal["min", "max"] = "min" if name.startswith("-") else "max"
        # a scheduler for one figure, over an optimizer that only has a rate: what it remembers are four numbers
        optimizer = torch.optim.SGD([torch.zeros(())], lr=self._rate)
        scheduler = ReduceLROnPlateau(
            optimizer, mode, self.factor, self.patience, self.threshold, cooldown=self.cooldown, min_lr=self.min
        )
        vars(scheduler).update(self._counts if self._heard == name else {})
        scheduler.step(figures[name.removeprefix("-")])
        self._rate, self._heard = optimizer.param_groups[0]["lr"], name
        self._counts = {key: vars(scheduler)[key] for key in COUNTS}

    def state(self) -> dict[str, Any]:
        """The rate, and what was counted of which figure."""
        return {"rate": self._rate, "figure": self._heard, "counts": self._counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._rate, self._heard = state.get("rate", 1.0), state.get("figure")
        self._counts = dict(state.get("counts", {}))
