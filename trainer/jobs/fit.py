"""The job `fit`: train one network, from what was asked for to the last checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any

from trainer.data.class_names import read_class_names
from trainer.jobs.build_trainer import make_checkpoints, make_mirror, make_trainer
from trainer.jobs.data_checks import data_notes
from trainer.jobs.doctor.host_facts import software_versions
from trainer.jobs.out_of_memory import give_back_freed_memory, is_memory_tight, keep_freed_memory, memory_advice
from trainer.jobs.plan_comparison import PlanComparison, planned_row
from trainer.jobs.preparation import build_weights_on_main, determinism_advice, prepare
from trainer.jobs.resume_decision import ResumeDecision, decide_resume, open_start
from trainer.jobs.run_messages import (
    best_lines,
    end_lines,
    format_devices,
    left_out_lines,
    replaced_lines,
    start_lines,
    summary_lines,
)
from trainer.jobs.run_parts import Job, PreparedRun, RunParts
from trainer.launch import failure, rank_output
from trainer.launch.devices import accelerator_names
from trainer.launch.hang_detection import make_watchdog
from trainer.launch.stop_signals import StopRequest, stopped_elsewhere_only
from trainer.launch.store_collectives import broadcast_from_main
from trainer.loop.progress import Progress
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal, format_count
from trainer.parallel.meta_model import is_meta_model
from trainer.parallel.ranks import gather_exceptions
from trainer.records.checkpoint.manifest import CheckpointInfo
from trainer.records.console import LogFile
from trainer.records.metrics_files import MetricsFile
from trainer.records.sinks import Log


class Fit(Job):
    """Train, evaluate and save until the end of the run."""

    def __call__(self, parts: RunParts) -> int:
        """Train; the exit code. Refusal, before any process group, where it cannot work."""
        began = perf_counter()
        # data, sums, network, and the folder last: what cannot work is refused while nothing has been made
        run, progress = prepare(parts), Progress()
        launch, folder = run.machine.launch, run.folder.path
        # before any value lies on a device: what was allocated under other rules stays where it is
        if is_meta_model(run.network) or is_memory_tight(run):
            give_back_freed_memory()
        else:
            keep_freed_memory()
        # one process compares with what lies in the folder and all follow: each for itself could see another moment
        decision = ResumeDecision(*broadcast_from_main(launch, "resume", lambda: decide_resume(run)))
        if decision.complete:
            if launch.is_main:
                print(f"{folder}: {decision.complete}")
            return 0
        run.machine = run.strategy.machine = replace(run.machine, precision=decision.precision)
        comparison = PlanComparison(run)
        rank_output.redirect_output(launch.rank, folder)
        log = Log([MetricsFile(), LogFile(), *run.sinks] if launch.is_main else [])
        # join: from now on ranks wait for each other, so one that fails ends all, with one account of why; and a
        # request to stop must be kept until the loop can hear it
        with (
            make_mirror(run) as mirror,  # around all else: no rank waits while the last checkpoint is copied
            StopRequest(launch, folder) as stop,
            failures_reported(run, progress, log),
            make_watchdog(launch, folder, stop, lambda: run.strategy.pulse(progress.step)),
            run.strategy,
            make_checkpoints(run, mirror) as checkpoints,
        ):
            start = checkpoints.newest() or open_start(run)
            # the folder's own files change only now, when it is sure that there is something to go on from
            record_start(run, start, decision.changed, log)
            # values after the checkpoint was found: a network that is read back is not built first
            build_weights_on_main(run, start)
            trainer = make_trainer(run, checkpoints, log, stop, progress, comparison)
            if start is None:  # a run that goes on has heard it
                for note in data_notes(run, trainer):
                    log.say(f"note        {note}")
            done = trainer.fit(start)
            return record_end(
                run, trainer, stop, done, began, comparison
            )  # inside: who was left behind is asked of the others


@contextmanager
def failures_reported(run: PreparedRun, progress: Progress, log: Log) -> Iterator[None]:
    """If something fails inside, the run's files say so; then raises RunFailed with advice about it."""
    folder = run.folder
    try:
        with failure.sys_exit_as_error():
            yield
    except (Exception, KeyboardInterrupt) as error:
        for finish in (partial(log.end, "failed"), log.close):
            with suppress(Exception):  # a full disk must not hide the cause
                finish()
        if isinstance(error, Refusal):  # a sentence and exit 2, as before the group
            folder.undo_start(progress.step, str(error))
            raise
        advice = memory_advice(error, run) or determinism_advice(error)
        raise failure.RunFailed(folder.path, progress.step or None, advice) from error


def describe_environment(run: PreparedRun) -> dict[str, Any]:
    """Collective: the content of environment.json: versions, hardware, git revision and what was resolved."""
    strategy, machine = run.strategy, run.machine
    hosts = strategy.world.gather_values(socket.gethostname())  # all ranks; the main one, which writes, hears them
    return {
        **software_versions(),
        "gpus": accelerator_names(),
        "cpus": os.cpu_count(),
        "git": git_revision(),
        "strategy": strategy.name,
        "world_size": strategy.world.size,
        "precision": machine.resolved_precision,
        "devices": format_devices(machine),
        "hosts": sorted(set(hosts)),
        "auto": asdict(run.auto) if run.auto else None,
        "planned": planned_row(run),
        "horizon": run.length.steps,
        "best": run.best_metric,
        "classes": read_class_names(run.data),
    }


def git_revision() -> str | None:
    """The revision of the checkout that the run was started in, with a plus sign where files had been changed."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no revision in it
        return None


def record_start(run: PreparedRun, start: CheckpointInfo | None, changed: Sequence[str], log: Log) -> None:
    """Collective: write what this start is, and take back what an earlier one logged after the step to go on from."""
    strategy, folder, length = run.strategy, run.folder, run.length
    step = start.step if start else 0
    # what runs, then that it runs: whoever sees `running` finds the rest
    folder.write_start_files(run.configuration, run.arguments, describe_environment(run))
    folder.begin(step, strategy.world.size, strategy.name)
    # what was logged after the step to go on from will be logged again
    log.open(folder.path, step, length.steps, -(-length.steps // length.per_epoch))
    log.text("configuration", run.configuration)
    for line in (*start_lines(run, start), *(f"changed     {change}" for change in changed)):
        log.say(line)


def record_end(
    run: PreparedRun, trainer: Trainer, stop: StopRequest, done: bool, began: float, comparison: PlanComparison
) -> int:
    """Collective: say how it ended, in status.json first, which a launcher's end may cut off; the exit code."""
    launch, step, log = run.machine.launch, trainer.progress.step, trainer.log
    lost = not done and stopped_elsewhere_only(launch, stop, run.strategy.world.all_gather_values)
    # all ranks; the main one hears what any was asked: one may have heard of it a second before the others do
    asked = [] if done else run.strategy.world.gather_values(stop.reason)
    why = next(filter(None, asked), f"run.stop_after={run.settings.run.stop_after or 0:g} s")
    early = f"{format_count(trainer.progress.stale, 'evaluation')} in a row without improvement: loop.patience"
    ended = early if step < trainer.steps else None
    reason = ended if done else "another machine left the run" if lost else why
    state = "completed" if done else "preempted"
    trainer.report(state, step, reason)
    # all ranks; each has read other samples
    replaced = gather_exceptions(run.strategy.world, run.data.replaced())
    # what it reached and where the time went, now that all steps are done and no line is under way
    table = summary_lines(run, trainer, perf_counter() - began) if launch.is_main else []
    left_out = left_out_lines(trainer.model.scaler.skipped_steps())
    best = best_lines(trainer.checkpoints) if done else []
    last = end_lines(run, trainer.metrics, step, done, ended)
    for line in (
        *table,
        *comparison.lines(),
        *trainer.profile.close(),
        *replaced_lines(replaced),
        *left_out,
        *best,
        *last,
    ):
        log.say(line)
    log.end(state)
    log.close()
    return failure.exit_code(done, launch, lost)
