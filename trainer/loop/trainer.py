"""The loop: when to step, log, evaluate, save and stop. What a step is, a strategy knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from torch.optim import Optimizer

from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.learning.freezing import frozen_names
from trainer.learning.intervals import Trigger
from trainer.learning.optimizer import init_momentum, set_rates
from trainer.learning.schedule import Schedule
from trainer.learning.task import Task
from trainer.loop.evaluation import evaluate, trial_evaluation
from trainer.loop.media_logging import NoMediaLogger
from trainer.loop.progress import Progress
from trainer.loop.train_metrics import StepMonitor
from trainer.parallel.optimizer_state import is_optimizer_state
from trainer.parallel.tensor_statistics import trained_tensors
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import CheckpointInfo
from trainer.records.profiler import NoProfiler
from trainer.records.resume_rules import keeps_optimizer
from trainer.records.sinks import Log
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel


@dataclass
class Trainer:
    """Trains one network to a number of steps. It gets all that it needs as objects, and knows no configuration."""

    strategy: Strategy
    model: ParallelModel
    task: Task
    optimizer: Optimizer
    schedule: Schedule
    train_loader: TrainLoader
    checkpoints: CheckpointManager
    steps: int  # where training ends
    horizon: int  # where the schedule ends
    eval_loader: EvalLoader | None = None
    log: Log = field(default_factory=lambda: Log([]))
    report: Callable[..., None] = lambda state, step: None  # how far a run is, where others can read it
    stop: Callable[[], bool] = lambda: False  # has somebody asked this process to stop?
    max_norm: float | None = None  # clip gradients to this global norm; None: never
    log_trigger: Trigger = field(default_factory=lambda: Trigger([]))
    eval_trigger: Trigger = field(default_factory=lambda: Trigger([]))
    save_trigger: Trigger = field(default_factory=lambda: Trigger([]))
    checkpoint_facts: dict[str, Any] = field(default_factory=dict)  # go into every checkpoint, beside the progress
    patience: float = math.inf  # evaluations in a row without a better one, after which training ends
    stop_after: float | None = None  # seconds; then as if somebody had asked to stop
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] | None = None  # of the last evaluation
    profile: NoProfiler = field(default_factory=NoProfiler)
    media: NoMediaLogger = field(default_factory=NoMediaLogger)

    def fit(self, start: CheckpointInfo | None) -> bool:
        """Train to the end, from a checkpoint if there is one; False: stopped by a request, and saved."""
        self.begin(start)
        while not self._is_over():  # once an epoch
            for batches in self.train_loader.epoch(self.progress.epoch, self.progress.position):
                self.train_step(batches)
                self.profile.step()
                if self._is_over():
                    break
            self._monitor.check(broken=False, failed=self._is_over())  # waits for the last save
        self.checkpoints.finish()
        self.model.watch.lap_between("save")
        return self.finished and self.progress.owed is None

    def _is_over(self) -> bool:
        return self.finished or self._stopped

    def begin(self, start: CheckpointInfo | None) -> None:
        """Collective: resume, try an evaluation, and get ready for the next step."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        began, self._stop_time = monotonic(), math.inf
        if start is not None:
            self.resume(start)
        init_momentum(self.optimizer)  # after a resume: a momentum of the checkpoint stays
        # one batch now, so that a mistake in the evaluation shows before hours of training
        if self.eval_loader is not None:
            wanted = {"checkpoint.best": self.checkpoints.best, **self.schedule.watched_metrics}
            trial_evaluation(self.strategy, self.model, self.task, self.eval_loader, wanted)
        self._stopped, self._log_clock, self._votes = False, False, self.strategy.votes()
        batch = self.train_loader.global_batch
        self._monitor = StepMonitor(self.strategy, self.model, batch, self.checkpoints, self.log, self.report)
        self.evaluate_owed()
        if self.stop_after is not None:  # only now: an owed evaluation that takes longer would never be done
            self._stop_time = began + self.stop_after

    @property
    def finished(self) -> bool:
        """Was this the last step, by number, or because no evaluation has been better for so long?"""
        return self.progress.step >= self.steps or self.progress.stale >= self.patience

    def resume(self, checkpoint: CheckpointInfo) -> None:
        """Collective: take over a checkpoint, of any strategy."""
        stored = checkpoint.tensors
        if not keeps_optimizer(checkpoint.state, self.checkpoint_facts):  # another one begins anew
            stored = {name: x for name, x in stored.items() if not is_optimizer_state(name)}
        tensors = self.model.empty_state(self.optimizer, stored)
        self.checkpoints.read(checkpoint, tensors)
        self.model.load_state(self.optimizer, tensors)
        vars(self.progress).update(checkpoint.state["progress"])
        self.schedule.load(checkpoint.state.get("schedule", {}))
        # with another batch size or a smaller set the epoch may have no whole batch left
        self.progress.begin_next_epoch(self.train_loader.global_batch, self.train_loader.length)

    def evaluate_owed(self) -> None:
        """Collective: do the evaluation that a request to stop interrupted, and save again with its metrics."""
        epoch, self.progress.owed = self.progress.owed, None
        if epoch is not None and self.eval_loader is not None and (metrics := self.evaluate(epoch)) is not None:
            self.save(metrics)

    def train_step(self, batches: list[Batch]) -> None:
        """Collective: one optimizer step, and what is due after it. Its line is written while the next one computes."""
        watch = self.model.watch
        watch.step()
        step, epoch = self.progress.step, self.progress.epoch
        # counted first: what is due after this step depends on whether it ends its epoch or the run
        ended = self.progress.advance(self.train_loader.global_batch, self.train_loader.length)
        # the last step always has a line, and an evaluation after this step may make it the last one
        may_end = self.progress.stale + 1 >= self.patience
        is_last = self.finished
        log_now = is_last or self.log_trigger.is_due(step + 1, ended, self._log_clock)
        rate = set_rates(self.optimizer, self._rates, self.schedule(step, epoch, self.horizon))
        # a GPU is busy with this from here on; the host comes back at once and does what follows meanwhile
        parts = self.model.forward_backward(batches, step)
        # requests and clocks differ between processes, but all must act alike after the step: so they vote
        log_clock = self.log_trigger.clock_expired() and not log_now  # the answer comes too late for this step
        raised = self._monitor.has_found(), self.checkpoints.failed(), self._should_stop()
        self._votes.ask(*raised, log_clock, self.eval_trigger.clock_expired(), self.save_trigger.clock_expired())
        # the line of the step before: its numbers have arrived by now, so reading them waits for nothing
        self._monitor.write()
        self.media.log_parameters(self.model, step + 1, ended)
        # without clipping the norm is measured only for a line, because it costs a pass over all gradients
        limit = self.max_norm if self.max_norm is not None or not (log_now or may_end) else math.inf
        norm = self.model.optimizer_step(self.optimizer, limit)
        self.model.after_step(step + 1)
        # losses are added up on the device; they come to the host with a line, one step later
        self._monitor.add(step + 1, batches, parts, norm)
        if step == 0:
            self.media.log_inputs(batches[0])
        watch.lap("optimizer")
        # read as late as possible, when the answer has long arrived
        broken, failed, self._stopped, self._log_clock, eval_clock, save_clock = self._votes.read()
        self._monitor.check(broken, failed)
        watch.lap("communication")
        eval_now = self.eval_loader is not None and (is_last or self.eval_trigger.is_due(step + 1, ended, eval_clock))
        if log_now or (may_end and eval_now):
            known = {"epoch": epoch, "lr": rate, "samples": self.progress.samples}
            self._monitor.begin(step + 1, batches, norm, known)
            self.log_trigger.restart()
        # the evaluation before the save: a checkpoint has its metrics, and the best one is kept
        metrics = self.evaluate(epoch) if eval_now else None
        save_now = self.finished or self._stopped or self.save_trigger.is_due(step + 1, ended, save_clock)
        if save_now or self.checkpoints.is_best(metrics):
            self.save(metrics)

    def evaluate(self, epoch: int) -> dict[str, float] | None:
        """Collective: metrics over the whole evaluation set; None if somebody asked to stop.

        Then nothing of it is written, and the resumed run does the evaluation.
        """
        assert self.eval_loader is not None
        self._monitor.write()
        with self._settled():
            metrics = None
            if not self._stopped:
                metrics = evaluate(
                    self.strategy, self.model, self.task, self.eval_loader, self._should_stop, self.media
                )
            if metrics is None:
                self._stopped, self.progress.owed = True, epoch
                return None
            self.log.eval({"step": self.progress.step, "epoch": epoch, "samples": self.eval_loader.size, **metrics})
            self.media.log_evaluation(self.model, self.progress.step)
        self.metrics = metrics
        self.progress.stale = 0 if self.checkpoints.improves(metrics) else self.progress.stale + 1
        self.schedule.observe(metrics, self.checkpoints.best)
        self.eval_trigger.restart()
        self._monitor.resume()
        self.model.watch.lap_between("evaluation")
        return metrics

    def save(self, metrics: dict[str, float] | None) -> None:
        """Collective: save a checkpoint. NotFinite or ReplicaDriftError instead of saving a broken network."""
        self._monitor.write()
        facts = {"progress": asdict(self.progress), "schedule": self.schedule.state(), "horizon": self.horizon}
        with self._settled():
            tensors = self.model.state(self.optimizer)
            self._monitor.check_before_save(self.progress.step, tensors)
            # first the lines, then the checkpoint: a resumed run drops later lines, but cannot restore missing ones
            self.log.flush()
            finite = trained_tensors(self.model.network, tensors)
            state, frozen = {**facts, **self.checkpoint_facts}, frozen_names(self.model.network)
            saved = self.checkpoints.save(self.progress.step, tensors, state, metrics, finite, frozen)
            self._monitor.check_saved(saved)
        self.report("running", self.progress.step)
        self.save_trigger.restart()
        self._monitor.resume()
        self.model.watch.lap_between("save")
        # a request to stop has its checkpoint now; the next vote of the loop may be some steps away
        (self._stopped,) = self._votes.now(self._stopped or self._should_stop())

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Collective: inside, the network is ready for an evaluation or a save; afterwards for the next step."""
        self.model.settle()
        yield
        self.model.unsettle()

    def _should_stop(self) -> bool:
        """Was this process asked to stop, or is its time over?"""
        return self.stop() or monotonic() >= self._stop_time
