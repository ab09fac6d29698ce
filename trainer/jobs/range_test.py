"""The job `lr`: a range test (Smith 2015, arXiv:1506.01186). Which learning rate suits a run? It leaves one picture."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from trainer.configuration.command_line import add_overrides
from trainer.jobs.build_trainer import make_checkpoints, make_trainer
from trainer.jobs.plan_comparison import PlanComparison
from trainer.jobs.preparation import build_weights_on_main, prepare
from trainer.jobs.rate_curve import RateCurve, draw_blocks
from trainer.jobs.rate_plot import plot_rates
from trainer.jobs.run_messages import launcher_command
from trainer.jobs.run_parts import Job, PreparedRun, RunParts
from trainer.launch import failure, rank_output
from trainer.launch.safe_files import replace_file
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.learning.intervals import Interval, Trigger
from trainer.learning.optimizer import make_trial_optimizer
from trainer.learning.schedule import Schedule
from trainer.loop.progress import Progress
from trainer.messages import NotFinite, Refusal, expand_home, format_count, format_number
from trainer.records.checkpoint.manager import CheckpointManager, NonFiniteSave
from trainer.records.checkpoint.mirror import NoMirror
from trainer.records.resume_rules import parse_config
from trainer.records.run_folder import RunFolder
from trainer.records.sinks import Log

_ROWS = 14  # of the table


@dataclass
class RisingRate(Schedule):
    """The rates of the test, as factors of the run's own: so groups with a rate of their own rise in proportion."""

    curve: RateCurve | None = None
    base: float = 1.0  # `optimizer.lr`
    needs_horizon: ClassVar[bool] = False

    def at(self, step: int, epoch: int, done: float) -> float:
        assert self.curve is not None
        return self.curve.rate(step) / self.base


class NoCheckpoints(CheckpointManager):
    """Those of a test, which writes none; a run saves at its end."""

    @override
    def save(self, *_: Any, **__: Any) -> NonFiniteSave:
        return NonFiniteSave()


class RangeTest(Job):
    """Train with a rate that rises until the loss diverges; print the curve, and the rate that it suggests."""

    def __init__(
        self, lowest: float = 1e-6, highest: float = 10.0, steps: int = 200, plot: str | None = "lr.png"
    ) -> None:
        if not 0 < lowest < highest or steps < 20:
            raise Refusal(
                f"job.lowest={lowest:g}, job.highest={highest:g}, job.steps={steps}: the rate rises from above 0 to a"
                " higher one in 20 steps or more; job.lowest=1e-6 job.highest=10 job.steps=200 is the default"
            )
        self.lowest, self.highest, self.steps = lowest, highest, steps
        self.plot = None if plot is None else expand_home(plot)

    def __call__(self, parts: RunParts) -> int:
        """Train and suggest; the exit code. Refusal where the run itself would be refused."""
        launch, resume = parts.machine.launch, parts.settings.run.resume
        if resume not in ("auto", "fresh"):
            raise Refusal(
                f"job=lr and run.resume={resume}: it begins as a new run does; init_from={resume} takes its weights"
            )
        make: Callable[[Any], Optimizer] = parts.make_optimizer
        base = float(make_trial_optimizer(make).param_groups[0]["lr"])
        if base <= 0:
            raise Refusal(f"job=lr: optimizer.lr is {base:g}, and other rates are in proportion to it; set any above 0")
        broadcast_from_main(launch, "plot", self._refuse_plot)
        # what ranks and libraries say goes where it goes in a run, into files that do not stay
        with TemporaryDirectory() as folder:
            run = prepare_without_folder(parts, Path(folder))
            curve = RateCurve(self.lowest, self.highest, self.steps, self.steps // _ROWS if launch.is_main else 0)
            rank_output.redirect_output(launch.rank, Path(folder))
            with StopRequest(launch) as stop, run.strategy:
                done = self._train(run, curve, base, stop)
        if done and launch.is_main:
            self._report(run, curve, base)
        return 0 if done else failure.exit_code(False, launch)

    def _train(self, run: PreparedRun, curve: RateCurve, base: float, stop: StopRequest) -> bool:
        """Collective: train until the loss diverges, on all ranks alike; False: somebody asked to stop."""
        if run.machine.launch.is_main:
            print(
                f"rate test   {format_count(self.steps, 'step')} of {run.settings.loop.global_batch} samples with"
                f" {run.strategy.name} on {format_count(run.strategy.world.size, 'process')}\n"
                f"  {'optimizer.lr':<14}loss",
                flush=True,
            )
        with make_checkpoints(run, NoMirror(), kind=NoCheckpoints) as checkpoints:
            build_weights_on_main(run, None)
            trainer = make_trainer(run, checkpoints, Log([curve]), stop, Progress(), PlanComparison(run))
            trainer.steps, trainer.schedule = self.steps, RisingRate(curve=curve, base=base)
            # a line for each step; no evaluation, no save. A rank that sees the loss diverge asks all to stop
            trainer.eval_loader, trainer.stop_after, trainer.stop = None, None, lambda: stop.raised or curve.diverged
            trainer.log_trigger, trainer.save_trigger = Trigger([Interval(1)]), Trigger([])
            try:
                trainer.fit(None)
            except NotFinite:  # on all ranks
                curve.diverged = True
            # all ranks; was any asked to stop by somebody?
            return not run.strategy.world.max_values([stop.raised])[0]

    def _report(self, run: PreparedRun, curve: RateCurve, base: float) -> None:
        """Print the curve and the suggestion, and draw it. The main rank calls it. base: the run's own rate."""
        if not curve.losses:
            print("suggestion  none: the first loss is not finite; is the data all right?", flush=True)
            return
        # the curve in one line, and the places on it
        smoothed, steps = curve.smoothed(), curve.find_rates()
        rate = float(f"{curve.rate(steps.chosen):.2g}") if steps else None
        line, *marks = draw_blocks(smoothed, steps.chosen if steps else None)
        lines = [f"curve       {line}", *(f"            {mark}" for mark in marks)]
        last = curve.rate(len(curve.losses) - 1)
        lines.append(
            f"diverged    at optimizer.lr={last:.2g}" if curve.diverged else f"diverged    not up to {last:.2g}"
        )
        if steps is None or rate is None:
            lines.append(
                "suggestion  none: the loss has not fallen; another job.lowest or job.highest, or more job.steps"
            )
        else:
            lines += [
                f"steepest    at optimizer.lr={curve.rate(steps.steepest):.2g}",
                f"lowest      {format_number(smoothed[steps.lowest])} at optimizer.lr={curve.rate(steps.lowest):.2g}",
                f"suggestion  optimizer.lr={rate:g}, in the middle of the last tenth of the fall; to train with it:",
                f"  {training_command(run, rate, rate / base)}",
            ]
        # the one file that stays
        if self.plot is not None:
            rates = [curve.rate(step) for step in range(len(curve.losses))]
            title = f"loss of each step, and smoothed; {run.settings.loop.global_batch} samples a step"
            replace_file(self.plot, plot_rates(rates, curve.losses, smoothed, rate, title))
            lines.append(f"written     {self.plot}")
        print("\n".join(lines), flush=True)

    def _refuse_plot(self) -> None:
        path = self.plot or Path("lr.png")
        if path.suffix != ".png" or not path.parent.is_dir():
            raise Refusal(f"job.plot={self.plot}: a file that ends in .png, in a folder that there is; null: none")


def prepare_without_folder(parts: RunParts, place: Path) -> PreparedRun:
    """The run as `fit` would prepare it, without loggers. place: of this process; the run itself makes no folder."""

    def open_nothing(check: Callable[[Path | None], Any]) -> RunFolder:
        # what the run would begin with is looked at, as before a run; the main rank decides for all
        broadcast_from_main(parts.machine.launch, "folder", lambda: check(None) and None)
        return RunFolder(place)  # without the lock it writes nothing

    parts.open_folder = open_nothing
    run = prepare(parts)
    run.sinks = []
    loop = replace(run.settings.loop, on_nonfinite="stop")
    run.settings = replace(run.settings, loop=loop, profile=None)
    return run


def training_command(run: PreparedRun, rate: float, factor: float) -> str:
    """The command that trains with this rate: the words of the test without those of the job.

    factor: by which the rate is another one; rates of their own have risen with it, and so they do in the command.
    """
    words = [word for word in run.arguments if not word.lstrip("+").startswith(("job=", "job.", "optimizer.lr="))]
    words = add_overrides(words, f"optimizer.lr={rate:g}")
    for key, value in own_rates(parse_config(run.configuration)["optimizer"], factor).items():
        words = add_overrides([w for w in words if not w.lstrip("+").startswith(f"{key}=")], f"{key}={value}")
    return f"{launcher_command(run.machine.launch)} -m trainer {shlex.join(words)}"


def own_rates(optimizer: Mapping[str, Any], factor: float) -> dict[str, str]:
    """The keys that give rates of their own, adamw_lr and those of groups, with these times the factor, as words."""
    keys = [key for key, value in optimizer.items() if key.endswith("_lr") and value is not None]
    rates = {f"optimizer.{key}": f"{factor * float(optimizer[key]):.2g}" for key in keys}
    groups = [dict(group) for group in optimizer.get("groups") or ()]
    for group in groups if any(group.get("lr") is not None for group in groups) else ():
        if group.get("lr") is not None:
            group["lr"] = float(f"{factor * float(group['lr']):.2g}")
        rates["optimizer.groups"] = f"[{','.join(map(_as_word, groups))}]"
    return rates


def _as_word(group: Mapping[str, Any]) -> str:
    return f"{{{','.join(f'{key}:{json.dumps(value)}' for key, value in group.items())}}}"
