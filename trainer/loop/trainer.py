"""The loop: when to step, log, evaluate, save and stop. What a step is, a strategy knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
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
from trainer.loop.progress import Progress, StopOnNonFinite
from trainer.loop.train_metrics import StepMonitor
from trainer.messages import NotFinite
from trainer.parallel.tensor_statistics import trained_tensors
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import CheckpointInfo
from trainer.records.profiler import NoProfiler
from trainer.records.sinks import Log
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel


@dataclass
class Trainer:
    """Trains one network to a number of steps. Everything it needs is given; it holds no configuration."""

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
    on_nonfinite: StopOnNonFinite = field(
        default_factory=StopOnNonFinite
    )  # what follows where a loss or a weight is not finite

    def fit(self, start: CheckpointInfo | None) -> bool:
        """Train to the end, from a checkpoint where there is one; False: stopped as asked, and saved."""
        self.begin(start)
        while not self._is_over():  # once an epoch, and after each time that it goes back
            try:
                for batches in self.train_loader.epoch(self.progress.epoch, self.progress.position):
                    self.train_step(batches)
                    self.profile.step()
                    if self._is_over():
                        break
                self._monitor.check(broken=False, failed=self._is_over())  # waits for the last save
            except NotFinite as error:
                self._roll_back(error)
        self.checkpoints.finish()
        self.model.watch.lap("save")
        return self.finished and self.progress.owed is None

    def _is_over(self) -> bool:
        return self.finished or self._stopped

    def begin(self, start: CheckpointInfo | None) -> None:
        """Collective: be ready for the next step."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        began, self._stop_time = monotonic(), math.inf
        if start is not None:
            self.resume(start)
        init_momentum(self.optimizer)  # after a resume: what a checkpoint has given stays as it is
        # one batch now: a mistake in the evaluation shows before hours of training, not after
        if self.eval_loader is not None:
            wanted = {"checkpoint.best": self.checkpoints.best, **self.schedule.watched_metrics}
            trial_evaluation(self.strategy, self.model, self.task, self.eval_loader, wanted, self.media)
        self._reset_step_state()
        self.evaluate_owed()
        if self.stop_after is not None:  # only now: an evaluation that takes longer than that would never be done
            self._stop_time = began + self.stop_after

    def _reset_step_state(self) -> None:
        """Collective: nothing is known of any step but where the next one begins."""
        self._stopped, self._log_clock, self._votes = False, False, self.strategy.votes()
        batch = self.train_loader.global_batch
        self._monitor = StepMonitor(self.strategy, self.model, batch, self.checkpoints, self.log, self.report)
        self._origin = replace(self.progress)

    @property
    def finished(self) -> bool:
        """Has the last step been done, or has nothing become better for so long that it was the last?"""
        return self.progress.step >= self.steps or self.progress.stale >= self.patience

    def resume(self, found: CheckpointInfo) -> None:
        """Collective: take over a checkpoint, whoever wrote it."""
        tensors = self.model.empty_state(self.optimizer, found.tensors)
        self.checkpoints.read(found, tensors)
        self.model.load_state(self.optimizer, tensors)
        vars(self.progress).update(found.state["progress"])
        self.schedule.load(found.state.get("schedule", {}))
        # another batch size, or a smaller set
        self.progress.begin_next_epoch(self.train_loader.global_batch, self.train_loader.length)

    def _roll_back(self, error: NotFinite) -> None:
        """Collective: go on from the last good checkpoint, with the samples after the broken step; or the error."""
        self.model.forget(self.optimizer)  # before anything is read: that may take long, and room
        found = self.on_nonfinite.target(error, self.checkpoints.newest)
        # later ones were read as well, but that depends on when the error was seen; where it was does not
        read = self._origin.after(error.step, self.train_loader.global_batch, self.train_loader.length)
        self.report("running", self.progress.step)
        self.resume(found)
        init_momentum(self.optimizer)
        self.progress.skip_to(read)
        self._reset_step_state()
        self.report("running", found.step)
        self.log.rewind(found.step)
        self.log.say(f"note        {error.what}; back to step {found.step}, and on with what follows:{error.read}")

    def evaluate_owed(self) -> None:
        """Collective: do the evaluation that a request to stop broke off, and give the checkpoint its figures."""
        epoch, self.progress.owed = self.progress.owed, None
        if epoch is not None and self.eval_loader is not None and (figures := self.evaluate(epoch)) is not None:
            self.save(figures)

    def train_step(self, batches: list[Batch]) -> None:
        """Collective: one optimizer step, and what is due after it; its line is written while the next one computes."""
        watch = self.model.watch
        watch.step()
        step, epoch = self.progress.step, self.progress.epoch
        # counted first: whether this step ends its epoch or the run decides what is due after it
        ended = self.progress.advance(self.train_loader.global_batch, self.train_loader.length)
        # one more evaluation may make this step the last, which has a line; whether there is one is known at its end
        may_end = self.progress.stale + 1 >= self.patience
        log_now = self.finished or self.log_trigger.is_due(step + 1, ended, self._log_clock)
        rate = set_rates(self.optimizer, self._rates, self.schedule(step, epoch, self.horizon))
        # what is given to the device here keeps it busy; the host is back at once and does what follows meanwhile
        parts = self.model.forward_backward(batches, step)
        # requests and clocks differ between processes, but all must do the same after the step: so they vote
        log_clock = self.log_trigger.clock_expired() and not log_now  # its answer comes too late for this step
        raised = self._monitor.has_found(), self.checkpoints.failed(), self._should_stop()
        self._votes.ask(*raised, log_clock, self.eval_trigger.clock_expired(), self.save_trigger.clock_expired())
        watch.lap("communication")
        # the line of the step before: its numbers have arrived by now, so that reading them waits for nothing
        self._monitor.write()
        watch.lap("log")
        self.media.log_parameters(self.model, step + 1, ended)
        # a norm that nobody clips by is a pass over all gradients, so it is taken for a line alone: clipped to infinity
        limit = self.max_norm if self.max_norm is not None or not (log_now or may_end) else math.inf
        norm = self.model.optimizer_step(self.optimizer, limit)
        self.model.after_step(step + 1)
        # losses are added up where they are; only a line, one step from now, brings them to the host
        self._monitor.add(step + 1, batches, parts, norm)
        if step == 0:
            self.media.log_inputs(batches[0])
        watch.lap("optimizer")
        # read as late as can be, when the answer has long been there
        broken, failed, self._stopped, self._log_clock, eval_clock, save_clock = self._votes.read()
        self._monitor.check(broken, failed)
        watch.lap("communication")
        eval_now = self.eval_loader is not None and (
            self.finished or self.eval_trigger.is_due(step + 1, ended, eval_clock)
        )
        if log_now or (may_end and eval_now):
            known = {"epoch": epoch, "lr": rate, "samples": self.progress.samples}
            self._monitor.begin(step + 1, batches, norm, known)
            self.log_trigger.restart()
        watch.lap("log")
        # an evaluation before a save: the checkpoint says how good it is, and the best one stays
        figures = self.evaluate(epoch) if eval_now else None
        save_now = self.finished or self._stopped or self.save_trigger.is_due(step + 1, ended, save_clock)
        if save_now or self.checkpoints.is_best(figures):
            self.save(figures)

    def evaluate(self, epoch: int) -> dict[str, float] | None:
        """Collective: figures over the whole evaluation set; None where somebody asked to stop.

        Nothing of it is written then, and the resumed run makes up for it.
        """
        assert self.eval_loader is not None
        self._monitor.write()
        with self._settled():
            figures = None
            if not self._stopped:
                figures = evaluate(
                    self.strategy, self.model, self.task, self.eval_loader, self._should_stop, self.media
                )
            if figures is None:
                self._stopped, self.progress.owed = True, epoch
                return None
            self.log.eval({"step": self.progress.step, "epoch": epoch, "samples": self.eval_loader.size, **figures})
            self.media.log_evaluation(self.model, self.progress.step)
        self.metrics = figures
        self.progress.stale = 0 if self.checkpoints.improves(figures) else self.progress.stale + 1
        self.schedule.observe(figures, self.checkpoints.best)
        self.eval_trigger.restart()
        self._monitor.resume()
        self.model.watch.lap("evaluation")
        return figures

    def save(self, figures: dict[str, float] | None) -> None:
        """Collective: keep all that a run needs to go on from here. NotFinite, Drifted instead of a broken network."""
        self._monitor.write()
        known = {"progress": asdict(self.progress), "schedule": self.schedule.state(), "horizon": self.horizon}
        with self._settled():
            tensors = self.model.state(self.optimizer)
            self._monitor.check_before_save(self.progress.step, tensors)
            # first the lines, then the checkpoint: a resumed run drops what is later, but invents nothing
            self.log.flush()
            finite = trained_tensors(self.model.network, tensors)
            state, still = {**known, **self.checkpoint_facts}, frozen_names(self.model.network)
            saved = self.checkpoints.save(self.progress.step, tensors, state, figures, finite, still)
            self._monitor.check_saved(saved)
        self.report("running", self.progress.step)
        self.save_trigger.restart()
        self._monitor.resume()
        self.model.watch.lap("save")
        # what they want is just done: the loop's own vote may be some steps away
        (self._stopped,) = self._votes.now(self._stopped or self._should_stop())

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Collective: inside, the network is ready for an evaluation or a save; afterwards for the next step again."""
        self.model.settle()
        try:
            yield
        except NotFinite:  # the same for all, and the run may go on; after any other error some may not come here
            self.model.unsettle()
            raise
        self.model.unsettle()

    def _should_stop(self) -> bool:
        """Is this process to stop?"""
        return self.stop() or monotonic() >= self._stop_time
