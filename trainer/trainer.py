"""The loop: when to step, log, evaluate, save and stop. What a step is, and where it runs, others know."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from trainer.cadence import Due
from trainer.checkpoint import Checkpoints, Found
from trainer.log import Log
from trainer.meter import Meter, PendingLine
from trainer.optim import begin_momentum
from trainer.profile import NoProfile
from trainer.refusal import Refusal, nearest
from trainer.schedule import Schedule
from trainer.strategies.base import Strategy
from trainer.strategies.placed import Placed
from trainer.stream import Batch, EvaluationStream, Stream
from trainer.task import Task


class Stop(Protocol):
    """Says whether somebody asked this process to stop."""

    @property
    def raised(self) -> bool:
        """True from the moment it was asked."""


class Report(Protocol):
    """Takes note of how far a run is, where others can read it."""

    def __call__(self, state: str, step: int) -> None:
        """`state`: running, completed, preempted."""


@dataclass
class Progress:
    """How far training is: all that a resumed run must know beside tensors."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch that the next step belongs to
    position: int = 0  # samples of that epoch's order that are done
    samples: int = 0  # samples trained on since the start, over all ranks


@dataclass
class Trainer:
    """Trains one network to a number of steps. Everything it needs is given; it holds no configuration."""

    strategy: Strategy
    placed: Placed
    task: Task
    optimizer: Optimizer
    schedule: Schedule
    stream: Stream
    evaluation: EvaluationStream | None
    checkpoints: Checkpoints
    log: Log
    report: Report
    stop: Stop
    steps: int  # where training ends
    horizon: int  # where the schedule ends
    max_norm: float | None  # clip gradients to this global norm; None: never
    log_due: Due
    eval_due: Due
    save_due: Due
    state: dict[str, Any] = field(default_factory=dict)  # goes into every checkpoint, beside the progress
    stop_after: float | None = None  # seconds; then as if somebody had asked to stop
    progress: Progress = field(default_factory=Progress)
    figures: dict[str, float] | None = None  # of the last evaluation
    profile: NoProfile = field(default_factory=NoProfile)

    def fit(self, start: Found | None) -> bool:
        """Train to the end, from a checkpoint where there is one; False: stopped as asked, and saved."""
        self.begin(start)
        while not self._over():
            for batches in self.stream.epoch(self.progress.epoch, self.progress.position):
                self.train_step(batches)
                self.profile.step()
                if self._over():
                    break
        self._write_pending()
        return self.finished

    def _over(self) -> bool:
        return self.finished or self._stopped

    def begin(self, start: Found | None) -> None:
        """Collective: be ready for the next step."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._pending: PendingLine | None = None
        self._stopped, self._log_clock = False, False
        self._deadline = math.inf if self.stop_after is None else monotonic() + self.stop_after
        if start is not None:
            self.resume(start)
        begin_momentum(self.optimizer)
        self.rehearse()
        self._meter = Meter(self.strategy, self.stream.global_batch)

    @property
    def finished(self) -> bool:
        """Has the last step been done?"""
        return self.progress.step >= self.steps

    def resume(self, found: Found) -> None:
        """Collective: take over a checkpoint, whoever wrote it."""
        tensors = self.placed.space(self.optimizer, found.tensors)
        self.checkpoints.read(found, tensors)
        self.placed.load_state(self.optimizer, tensors)
        vars(self.progress).update(found.state["progress"])
        if self.progress.position + self.stream.global_batch > self.stream.length:  # another batch size, a smaller set
            self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0

    def rehearse(self) -> None:
        """Collective: evaluate one batch, so that what is wrong there shows now and not after an epoch.

        Refusal where the figure that marks the best checkpoint is none of the task's.
        """
        if self.evaluation is None:
            return
        figures, best = self._figures(self._totals(most=1)), self.checkpoints.best.removeprefix("-")
        if best not in figures:
            raise Refusal(
                f"checkpoint.best={best}: the task's figures are {', '.join(figures)}{nearest(best, figures)}"
            )

    def train_step(self, batches: list[Batch]) -> None:
        """Collective: one optimizer step, and what is due after it."""
        watch = self.placed.watch
        watch.step()
        step, epoch = self.progress.step, self.progress.epoch
        ended = self._advance()
        log_now = self.finished or self.log_due.now(step + 1, ended, self._log_clock)
        rate = self._set_rate(step)
        parts = self.placed.forward_backward(batches, step)
        vote = self.strategy.vote(
            self.stop.raised or monotonic() >= self._deadline,
            self.log_due.clock() and not log_now,  # for the next step
            self.eval_due.clock(),
            self.save_due.clock(),
        )
        watch.lap("communication")
        self._write_pending()  # of the step before: its numbers have arrived by now
        watch.lap("log")
        limit = self.max_norm if self.max_norm is not None or not log_now else math.inf
        norm = self.placed.optimizer_step(self.optimizer, limit)
        self.placed.after_step(step + 1)
        watch.lap("optimizer")
        self._meter.add(parts)
        if step == 0:
            self.log.images("inputs", batches[0].inputs, step)
        if log_now:
            known = {"step": step + 1, "epoch": epoch, "lr": rate, "samples": self.progress.samples}
            self._pending = self._meter.line(batches, norm, known)
            self.log_due.restart()
        watch.lap("log")
        self._stopped, self._log_clock, eval_clock, save_clock = vote.read()
        watch.lap("communication")
        figures = None
        if self.evaluation is not None and (self.finished or self.eval_due.now(step + 1, ended, eval_clock)):
            figures = self.evaluate(epoch)
        save_now = self.finished or self._stopped or self.save_due.now(step + 1, ended, save_clock)
        if save_now or self.checkpoints.is_best(figures):
            self.save(figures)

    def evaluate(self, epoch: int) -> dict[str, float]:
        """Collective: figures over the whole evaluation set, every sample counted once. RuntimeError if not."""
        assert self.evaluation is not None
        self._write_pending()
        self.placed.settle()
        totals = self._totals(most=None)
        samples = int(totals["samples"])
        if samples != self.evaluation.size:
            raise RuntimeError(f"evaluated {samples} samples of a set of {self.evaluation.size}")
        figures = self._figures(totals)
        self.log.eval({"step": self.progress.step, "epoch": epoch, "samples": samples, **figures})
        self.figures = figures
        self.eval_due.restart()
        self._meter.resume()
        self.placed.watch.lap("evaluation")
        return figures

    def save(self, figures: dict[str, float] | None) -> None:
        """Collective: keep all that a run needs to go on from here. FloatingPointError instead of a broken network."""
        self._write_pending()
        if not self._meter.finite():
            raise FloatingPointError(f"the loss stopped being a number before step {self.progress.step}; nothing saved")
        self.placed.settle()
        state = {"progress": asdict(self.progress), "horizon": self.horizon, **self.state}
        tensors = self.placed.state(self.optimizer)
        self.log.flush()
        self.checkpoints.save(self.progress.step, tensors, state, figures)
        self.report("running", self.progress.step)
        self.save_due.restart()
        self._meter.resume()
        self.placed.watch.lap("save")

    def _advance(self) -> int | None:
        """Count a step; how many epochs are done, if it ends one."""
        progress, batch = self.progress, self.stream.global_batch
        progress.step += 1
        progress.samples += batch
        progress.position += batch
        if progress.position + batch <= self.stream.length:
            return None
        progress.epoch, progress.position = progress.epoch + 1, 0
        return progress.epoch

    def _set_rate(self, step: int) -> float:
        factor = self.schedule(step, self.horizon)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return self._rates[0] * factor

    def _totals(self, most: int | None) -> dict[str, Tensor]:
        """Collective: the sums over (at most so many batches of) the evaluation set."""
        assert self.evaluation is not None
        sums: dict[str, Tensor] = {}
        for batch, valid in self.evaluation.batches(most):
            for name, part in self.placed.evaluate(batch, valid).items():
                sums[name] = sums[name] + part if name in sums else part
        return self.strategy.reduce(sums)

    def _figures(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The mean loss, and what the task makes of the totals."""
        loss = float(totals["loss"] / (totals["weight"] or 1))  # of nothing the mean is 0
        return {"loss": loss, **{name: float(value) for name, value in self.task.finish(totals).items()}}

    def _write_pending(self) -> None:
        """Write the last training line, unless it was. FloatingPointError if its loss is not a number."""
        if self._pending is None:
            return
        line, self._pending = self._pending.read(), None
        self.log.train(line)
        self.report("running", int(line["step"]))
        if not math.isfinite(float(line["loss_mean"])):
            raise FloatingPointError(f"the loss at step {line['step']} is {line['loss']}, not a number; training stops")
