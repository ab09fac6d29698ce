"""The learning rate over time, as a factor: of most schedules it depends on the step alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.refusal import Refusal


class Unmoved:
    """A schedule of the step alone: it fits every run, hears figures without a change, and remembers nothing."""

    def check(self, steps: int, per_epoch: int) -> None:
        """Refuse a run of so many steps, so many of them an epoch, that cannot come to its end."""

    @property
    def follows(self) -> Mapping[str, str]:
        """The figures that it reads, by the keys that name them; "-loss": smaller is better."""
        return {}

    def hear(self, figures: Mapping[str, float], best: str) -> None:
        """The figures of an evaluation, the same on every rank; best: the one that marks the best checkpoint."""

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON has it; it goes into every checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back; empty where the checkpoint's schedule remembered nothing."""


@dataclass
class Schedule(Unmoved, ABC):
    """The factor of the learning rate for each optimizer step: a linear warm-up, then `at`.

    Steps and epochs count from 0. The horizon is the number of steps of the whole run. A subclass defines `at`.
    """

    warmup: int = 0  # optimizer steps of linear warm-up; the first step has 1 / warmup of the learning rate
    reference_batch: int | None = None  # the learning rate is multiplied by global batch / this; None: not scaled

    needs_horizon: ClassVar[bool] = True  # does a longer run have other learning rates?
    needs_figures: ClassVar[bool] = False  # does it use the metrics of evaluations?

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise Refusal(f"schedule.warmup is {self.warmup}; it counts optimizer steps, 0 or more")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise Refusal(f"schedule.reference_batch is {self.reference_batch}; it counts samples, or is null")

    @property
    def label(self) -> str:
        """What a run says it is."""
        return type(self).__name__.lower()

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        """The factor for this step, which is of this epoch."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        # a run may end in its warm-up, and a longer one than planned stays at the end
        left = horizon - self.warmup
        return self.at(step, epoch, min((step - self.warmup) / left, 1.0) if left > 0 else 1.0)

    def scale(self, global_batch: int) -> float:
        """The factor for this global batch, the same at every step."""
        return global_batch / self.reference_batch if self.reference_batch else 1.0

    @abstractmethod
    def at(self, step: int, epoch: int, done: float) -> float:
        """The factor after the warm-up; done: the fraction, 0..1, of the steps after the warm-up."""


@dataclass
class Constant(Schedule):
    """The same learning rate in all steps, after the warm-up."""

    needs_horizon: ClassVar[bool] = False

    def at(self, step: int, epoch: int, done: float) -> float:
        return 1.0


@dataclass
class Cosine(Schedule):
    """From the full rate down to `final` of it along half a cosine."""

    final: float = 0.0  # part of the full rate, 0..1

    def at(self, step: int, epoch: int, done: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass
class Linear(Schedule):
    """From the full rate straight down to `final` of it."""

    final: float = 0.0  # part of the full rate, 0..1

    def at(self, step: int, epoch: int, done: float) -> float:
        return 1 - (1 - self.final) * done


@dataclass
class Step(Schedule):
    """The rate times `gamma` at each milestone."""

    milestones: tuple[int, ...] = ()  # optimizer steps
    gamma: float = 0.1
    needs_horizon: ClassVar[bool] = False

    def at(self, step: int, epoch: int, done: float) -> float:
        return self.gamma ** sum(step >= milestone for milestone in self.milestones)


@dataclass
class WSD(Schedule):
    """Warm-up, stable, decay: the full rate, then straight down to `final` of it in the last part of the run."""

    decay: float = 0.2  # part of the steps after the warm-up, 0..1
    final: float = 0.0  # part of the full rate, 0..1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay <= 1:
            raise Refusal(f"schedule.decay is {self.decay}; it is a fraction of the run, between 0 and 1")

    def at(self, step: int, epoch: int, done: float) -> float:
        into = max(done - (1 - self.decay), 0.0)
        return 1 - (1 - self.final) * into / self.decay if into else 1.0
