"""The job `fit`: train one network, from what was asked for to the last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from trainer.jobs.allocator import give_back_freed_memory, keep_freed_memory, remedy
from trainer.jobs.build_trainer import make_checkpoints, make_trainer
from trainer.jobs.determinism import way_out
from trainer.jobs.preparation import Prepared, build_values, prepare
from trainer.jobs.resume_decision import Verdict, decide_resume
from trainer.jobs.run_messages import best_lines, describe, end_lines, left_out_lines, replaced_lines, start_lines
from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.summary import summary
from trainer.launch import failure, rank_output
from trainer.launch.hang_detection import make_watchdog
from trainer.launch.run_status import process_age
from trainer.launch.stop_signals import StopRequest, stopped_elsewhere_only
from trainer.launch.store_collectives import broadcast_from_main
from trainer.loop.progress import Progress
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal, format_count
from trainer.parallel.meta_model import is_meta_model
from trainer.records.checkpoint.manifest import TO_RESUME, Found
from trainer.records.checkpoint.store import newest_in, open_checkpoint
from trainer.records.console import LogFile
from trainer.records.metrics_files import Figures
from trainer.records.resume_rules import is_checkpoint, start_path
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
        if is_meta_model(run.network):
            give_back_freed_memory()
        else:
            keep_freed_memory()
        # one process compares with what lies in the folder and all follow: each for itself could see another moment
        verdict = Verdict(*broadcast_from_main(launch, "resume", lambda: decide_resume(run)))
        if verdict.complete:
            if launch.is_main:
                print(f"{folder}: {verdict.complete}")
            return 0
        run.machine = run.strategy.machine = replace(run.machine, precision=verdict.precision)
        rank_output.redirect_output(launch.rank, folder)
        log = Log([Figures(), LogFile(), *run.sinks] if launch.is_main else [])
        # join: from now on ranks wait for each other, so one that fails ends all, with one account of why; and a
        # request to stop must be kept until the loop can hear it
        with (
            StopRequest(launch, folder) as stop,
            accounted(run, progress, log),
            make_watchdog(launch, folder, stop, lambda: run.strategy.pulse(progress.step)),
            run.strategy,
            make_checkpoints(run) as checkpoints,
        ):
            start = checkpoints.newest() or start_from(run)
            # the folder's own words change only now, when it is sure that there is something to go on from
            begin(run, start, verdict.changed, log)
            # values after the checkpoint was found: a network that is read back is not built first
            build_values(run, resuming=start is not None)
            trainer = make_trainer(run, checkpoints, log, stop, progress)
            done = trainer.fit(start)
            return end(run, trainer, stop, done, began)  # inside: who was left behind is asked of the others


@contextmanager
def accounted(run: Prepared, progress: Progress, log: Log) -> Iterator[None]:
    """Where something fails inside, the run's files say so. Failed then, with what an account of it needs."""
    folder = run.folder
    try:
        with failure.sys_exit_as_error():
            yield
    except (Exception, KeyboardInterrupt) as error:
        for last in (partial(log.end, "failed"), log.close):
            with suppress(Exception):  # a full disk must not hide the cause
                last()
        if isinstance(error, Refusal):  # a sentence and exit 2, as before the group
            folder.take_back(progress.step, str(error))
            raise
        raise failure.RunFailed(folder.path, progress.step or None, remedy(error, run) or way_out(error)) from error


def start_from(run: Prepared) -> Found | None:
    """Collective: what `run.resume` names: a checkpoint, or the newest of a run folder."""
    path, ranks = start_path(run.settings.run.resume), run.strategy.world
    if path is None:
        return None
    if is_checkpoint(path):
        found: Found | None = open_checkpoint(path, ranks, TO_RESUME)
    else:
        found, _ = newest_in(path / "checkpoints", ranks, TO_RESUME)
    # the best of another folder is not to be beaten here, so what was counted since is no matter
    return found and replace(found, state={**found.state, "progress": {**found.state["progress"], "stale": 0}})


def begin(run: Prepared, start: Found | None, changed: Sequence[str], log: Log) -> None:
    """Collective: write what this start is, and take back what an earlier one logged after the step to go on from."""
    strategy, folder, length = run.strategy, run.folder, run.length
    step = start.step if start else 0
    # what runs, then that it runs: whoever sees `running` finds the rest
    folder.write_start(run.configuration, run.arguments, describe(run))
    folder.begin(step, strategy.world.size, strategy.name, process_age() if run.machine.launch.owns_process else 0.0)
    # what was logged after the step to go on from will be logged again
    log.open(folder.path, step, length.steps, -(-length.steps // length.per_epoch))
    log.text("configuration", run.configuration)
    for line in (*start_lines(run, start), *(f"changed     {one}" for one in changed)):
        log.say(line)


def end(run: Prepared, trainer: Trainer, stop: StopRequest, done: bool, began: float) -> int:
    """Collective: say how it ended, in status.json first, which a launcher's end may cut off; the exit code."""
    launch, step, log = run.machine.launch, trainer.progress.step, trainer.log
    lost = not done and stopped_elsewhere_only(launch, stop, run.strategy.world.all_gather_values)
    # all ranks; each hears what any was asked: one may have heard of it a second before the others do
    asked = [] if done else run.strategy.world.all_gather_values(stop.reason)
    why = next(filter(None, asked), f"run.stop_after={run.settings.run.stop_after or 0:g} s")
    early = f"{format_count(trainer.progress.stale, 'evaluation')} in a row without improvement: loop.patience"
    ended = early if step < trainer.steps else None
    reason = ended if done else "another machine left the run" if lost else why
    state = "completed" if done else "preempted"
    trainer.report(state, step, reason)
    # all ranks; each has read other samples
    replaced = run.strategy.world.all_gather_values(run.data.replaced())
    # what it reached and where the time went, now that all steps are done and no line is under way
    table = summary(run, trainer, perf_counter() - began) if launch.is_main else []
    left_out = left_out_lines(trainer.placed.scaler.left_out(), trainer.progress)
    best = best_lines(trainer.checkpoints) if done else []
    last = end_lines(run, trainer.figures, step, done, ended)
    for line in (*table, *trainer.profile.close(), *replaced_lines(replaced), *left_out, *best, *last):
        log.say(line)
    log.end(state)
    log.close()
    return failure.exit_code(done, launch, lost)
