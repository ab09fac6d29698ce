"""The learning rate over time: by step, by a metric, or by torch's schedulers."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.messages import Refusal


class StatelessSchedule:
    """A schedule that depends on the step alone: it fits every run, ignores metrics, and has no state."""

    def check(self, steps: int, per_epoch: int) -> None:
        """Refuse a run of so many steps, so many of them an epoch, that cannot come to its end."""

    @property
    def watched_metrics(self) -> Mapping[str, str]:
        """The metrics that it reads, by the keys of the configuration that name them; "-loss": smaller is better."""
        return {}

    def observe(self, metrics: Mapping[str, float], best: str) -> None:
        """Take the metrics of an evaluation, the same on every rank; best: the one that marks the best checkpoint."""

    def state(self) -> dict[str, Any]:
        """Its state as JSON, for every checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state; empty if the schedule of the checkpoint had none."""


@dataclass
class Schedule(StatelessSchedule, ABC):
    """The factor of the learning rate for each optimizer step: a linear warm-up, then `at`.

    Steps and epochs count from 0. The horizon is the number of steps of the whole run. A subclass defines `at`.
    """

    warmup: int | str = (
        0  # optimizer steps of linear warm-up, or epochs (5ep); the first step has 1 / steps of the rate
    )
    reference_batch: int | None = None  # the learning rate is multiplied by global batch / this; None: not scaled

    needs_horizon: ClassVar[bool] = True  # does a longer run have other learning rates?
    needs_figures: ClassVar[bool] = False  # does it use the metrics of evaluations?
    _epoch_steps = 0  # until they are known

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(ep)?", str(self.warmup)):
            raise Refusal(f"schedule.warmup is {self.warmup}; it counts optimizer steps, 0 or more, or epochs (5ep)")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise Refusal(f"schedule.reference_batch is {self.reference_batch}; it counts samples, or is null")

    @property
    def label(self) -> str:
        """Its name in the output of a run."""
        return type(self).__name__.lower()

    def set_epoch_length(self, steps: int) -> None:
        """How many steps an epoch has, for a warm-up in epochs."""
        self._epoch_steps = steps

    def count_warmup(self) -> int:
        """The optimizer steps of the warm-up."""
        return self.warmup if isinstance(self.warmup, int) else int(self.warmup.removesuffix("ep")) * self._epoch_steps

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        """The factor of the learning rate for this step of this epoch."""
        warmup = self.count_warmup()
        if step < warmup:
            return self.warming((step + 1) / warmup)  # the first step has 1 / warmup, so that it learns, too
        # a run may end in its warm-up, and a longer one than planned stays at the end
        left = horizon - warmup
        return self.at(step, epoch, min((step - warmup) / left, 1.0) if left > 0 else 1.0)

    def scale(self, global_batch: int) -> float:
        """The factor for this global batch, the same at every step."""
        # the linear scaling rule (Goyal et al., 2017, arXiv:1706.02677)
        return global_batch / self.reference_batch if self.reference_batch else 1.0

    def warming(self, done: float) -> float:
        """The factor in the warm-up; done: the fraction of its steps, with this one."""
        return done

    def differs(self, steps: int, per_epoch: int, horizon: int, other: int) -> bool:
        """Would the first `steps` steps have other rates under one horizon than under another?"""
        factors = (
            (self(step, step // per_epoch, horizon), self(step, step // per_epoch, other)) for step in range(steps)
        )
        return self.needs_horizon and any(first != second for first, second in factors)

    @abstractmethod
    def at(self, step: int, epoch: int, done: float) -> float:
        """The factor after the warm-up; done: the fraction, 0..1, of the steps after the warm-up."""


def _refuse_impossible_parts(**parts: float) -> None:
    """Refuse parts of the full rate that are none: a rate below 0 would unlearn."""
    for key, part in parts.items():
        if not 0 <= part <= 1:
            raise Refusal(f"schedule.{key} is {part}; it is a part of the full rate, between 0 and 1")


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_impossible_parts(final=self.final)

    def at(self, step: int, epoch: int, done: float) -> float:
        # (1 + cos) / 2 falls from 1 to 0 while done goes from 0 to 1
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass
class Linear(Schedule):
    """From the full rate straight down to `final` of it; with a warm-up a triangle, which begins at `start`."""

    final: float = 0.0  # part of the full rate, 0..1
    start: float = 0.0  # part of the full rate from which the warm-up rises, 0..1

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_impossible_parts(start=self.start, final=self.final)

    def warming(self, done: float) -> float:
        return self.start + (1 - self.start) * done

    def at(self, step: int, epoch: int, done: float) -> float:
        return 1 - (1 - self.final) * done


@dataclass
class Step(Schedule):
    """The rate times `gamma` at each milestone."""

    milestones: tuple[int, ...] = ()  # optimizer steps
    gamma: float = 0.1
    needs_horizon: ClassVar[bool] = False

    def at(self, step: int, epoch: int, done: float) -> float:
        # one factor for each milestone that has passed
        return self.gamma ** sum(step >= milestone for milestone in self.milestones)


@dataclass
class WSD(Schedule):
    """Warm-up, stable, decay: the full rate, then straight down to `final` of it in the last part of the run."""

    decay: float = 0.2  # part of the steps after the warm-up, 0..1
    decay_steps: int | None = None  # or the number of these steps: a run may branch off from the stable part of another
    final: float = 0.0  # part of the full rate, 0..1

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_impossible_parts(final=self.final)
        if not 0 <= self.decay <= 1:
            raise Refusal(
                f"schedule.decay is {self.decay}; it is a fraction of the run, between 0 and 1; in steps:"
                " schedule.decay_steps"
            )
        if self.decay_steps is not None and self.decay_steps < 0:
            raise Refusal(f"schedule.decay_steps is {self.decay_steps}; it counts optimizer steps, 0 or more")

    def check(self, steps: int, per_epoch: int) -> None:
        """Refuse a decay that would begin before the warm-up has ended."""
        warmup = self.count_warmup()
        if self.decay_steps and warmup + self.decay_steps > steps:
            raise Refusal(
                f"schedule.warmup {warmup:,} + schedule.decay_steps {self.decay_steps:,} is more than the"
                f" {steps:,} steps of the run (loop.steps); schedule.decay_steps={max(steps - warmup, 0)} fits"
            )

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        if self.decay_steps is None or step < self.count_warmup():
            return super().__call__(step, epoch, horizon)
        into = min(max(step - (horizon - self.decay_steps), 0), self.decay_steps)  # steps of the decay
        return 1 - (1 - self.final) * into / self.decay_steps if into else 1.0

    def at(self, step: int, epoch: int, done: float) -> float:
        into = max(done - (1 - self.decay), 0.0)  # how far the decay is, 0..decay
        return 1 - (1 - self.final) * into / self.decay if into else 1.0


COUNTS = ("best", "num_bad_epochs", "cooldown_counter")  # the state of torch's scheduler between two metrics


@dataclass
class Plateau(Schedule):
    """The rate times `factor` when more than `patience` evaluations in a row have brought no better metric.

    torch.optim.lr_scheduler.ReduceLROnPlateau does the counting; its epochs are evaluations here.
    """

    figure: str | None = None  # accuracy, or -loss: smaller is better; None: the one that marks the best checkpoint
    factor: float = 0.1
    patience: int = 10  # evaluations
    threshold: float = 1e-4  # better by this part of the best metric, or it does not count
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
        # the state, which every checkpoint has
        self._rate = 1.0  # part of the full rate
        self._counts: dict[str, float] = {}
        self._observed: str | None = None  # the metric that they are about

    def at(self, step: int, epoch: int, done: float) -> float:
        """The factor after the metrics so far."""
        return self._rate

    @property
    def watched_metrics(self) -> Mapping[str, str]:
        """The metric, if it is not the one that marks the best checkpoint."""
        return {"schedule.figure": self.figure} if self.figure else {}

    def observe(self, metrics: Mapping[str, float], best: str) -> None:
        """Count one evaluation, and lower the rate if too many were no better."""
        name = self.figure or best
        mode: Literal["min", "max"] = "min" if name.startswith("-") else "max"
        # a new scheduler for each metric, over an optimizer that only has a rate: its state are four numbers
        optimizer = torch.optim.SGD([torch.zeros(())], lr=self._rate)
        scheduler = ReduceLROnPlateau(
            optimizer, mode, self.factor, self.patience, self.threshold, cooldown=self.cooldown, min_lr=self.min
        )
        # counts of another metric mean nothing for this one
        vars(scheduler).update(self._counts if self._observed == name else {})
        scheduler.step(metrics[name.removeprefix("-")])
        self._rate, self._observed = optimizer.param_groups[0]["lr"], name
        self._counts = {key: vars(scheduler)[key] for key in COUNTS}

    def state(self) -> dict[str, Any]:
        """The rate, and what was counted of which metric."""
        return {"rate": self._rate, "figure": self._observed, "counts": self._counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._rate, self._observed = state.get("rate", 1.0), state.get("figure")
        self._counts = dict(state.get("counts", {}))


@dataclass(kw_only=True)
class TorchSchedule(Schedule):
    """A scheduler of torch's over an optimizer that only has a rate, stepped once an epoch or once a step.

    A resumed run steps it again from the start: so nothing has to be stored, and any scheduler can be used.
    """

    make: Callable[[Optimizer], LRScheduler]
    rate: float  # of the run's optimizer: numbers like eta_min and max_lr are relative to it
    per: Literal["step", "epoch"] = "epoch"  # how often it is stepped
    needs_horizon: ClassVar[bool] = False  # its own keys say how long it takes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stepped: int = 0  # how often it was stepped
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
        needed = steps if self.per == "step" else -(-steps // per_epoch)  # an epoch that has begun counts
        total = getattr(self._scheduler, "total_steps", needed)  # OneCycleLR fails behind its end
        if needed > total:
            raise Refusal(
                f"schedule: {self._kind} ends after {total:,} and is stepped once {self.label.split('once ')[1]}, of"
                f" which this run has {needed:,}; give it schedule.total_steps={needed}"
            )

    def __call__(self, step: int, epoch: int, horizon: int) -> float:
        """The factor for this step; in the warm-up a growing part of what the scheduler says."""
        return min((step + 1) / max(self.count_warmup(), 1), 1.0) * self.at(step, epoch, 1.0)

    def at(self, step: int, epoch: int, done: float) -> float:
        """What the scheduler says, as a part of the optimizer's rate."""
        wanted = step if self.per == "step" else epoch
        if wanted < self._stepped:  # a scheduler cannot go back
            self._begin()
        for _ in range(self._stepped, wanted):
            self._scheduler.step()
        self._stepped = wanted
        # a factor, because each parameter group has its own rate; a rate of 0 stays 0
        return self._optimizer.param_groups[0]["lr"] / (self.rate or 1.0)

    def _begin(self) -> None:
        # no momentum: one that cycles it shows
        self._optimizer = torch.optim.SGD([torch.zeros(())], lr=self.rate, momentum=0.0)
        self._scheduler, self._stepped = self.make(self._optimizer), 0
        self._optimizer.step()  # or torch would remark that schedulers are stepped behind optimizers

    @property
    def _kind(self) -> str:
        return type(self._scheduler).__name__
