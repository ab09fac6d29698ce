"""The job `fit`: train one network, from what was asked for to the last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from trainer.counted import counted
from trainer.data.reader import Loading
from trainer.data.stream import EvaluationStream, Stream
from trainer.jobs.determinism import way_out
from trainer.jobs.memory import evaluation_batch, give_back_freed_memory, keep_freed_memory, remedy
from trainer.jobs.preparation import Job, Prepared, RunParts, Verdict, build_values, decide_resume, prepare
from trainer.jobs.report import best_lines, describe, end_lines, replaced_lines, start_lines
from trainer.launch import failure, screen
from trainer.launch.agreement import decided_by_main
from trainer.launch.signals import StopRequest, left_behind
from trainer.learning.cadence import Due
from trainer.learning.optimizer import no_fused_step, parameter_groups
from trainer.parallel.outline import is_outline
from trainer.records.checkpoint import Checkpoints
from trainer.records.console import LogFile
from trainer.records.log import Figures, Log
from trainer.records.manifest import Found
from trainer.records.profile import NoProfile, Profile
from trainer.records.resume import is_checkpoint, read_config, start_path
from trainer.records.shelf import newest_in, open_checkpoint
from trainer.refusal import Refusal
from trainer.trainer import Progress, Trainer


class Fit(Job):
    """Train, evaluate and save until the end of the run."""

    def __call__(self, parts: RunParts) -> int:
        """Train; the exit code. Refusal, before any process group, where it cannot work."""
        # data, sums, network, and the folder last: what cannot work is refused while nothing has been made
        run, progress = prepare(parts), Progress()
        launch, folder = run.machine.launch, run.folder.path
        # before any value lies on a device: what was allocated under other rules stays where it is
        if is_outline(run.network):
            give_back_freed_memory()
        else:
            keep_freed_memory()
        # one process compares with what lies in the folder and all follow: each for itself could see another moment
        verdict = Verdict(*decided_by_main(launch, "resume", lambda: decide_resume(run)))
        if verdict.complete:
            if launch.is_main:
                print(f"{folder}: {verdict.complete}")
            return 0
        run.machine = run.strategy.machine = replace(run.machine, precision=verdict.precision)
        screen.redirect(launch.rank, folder)
        log = Log([Figures(), LogFile(), *run.sinks] if launch.is_main else [])
        # join: from now on ranks wait for each other, so one that fails ends all, with one account of why; and a
        # request to stop must be kept until the loop can hear it
        with accounted(run, progress, log), StopRequest(launch, folder) as stop, run.strategy:
            checkpoints = make_checkpoints(run)
            start = checkpoints.newest() or start_from(run)
            # the folder's own words change only now, when it is sure that there is something to go on from
            begin(run, start, verdict.changed, log)
            # values after the checkpoint was found: a network that is read back is not built first
            build_values(run, resuming=start is not None)
            trainer = make_trainer(run, checkpoints, log, stop, progress)
            done = trainer.fit(start)
            return end(run, trainer, stop, done)  # inside: who was left behind is asked of the others


@contextmanager
def accounted(run: Prepared, progress: Progress, log: Log) -> Iterator[None]:
    """Where something fails inside, the run's files say so. Failed then, with what an account of it needs."""
    folder = run.folder
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # a full disk must not hide the cause
            log.close()
        if isinstance(error, Refusal):  # a sentence and exit 2, as before the group
            folder.take_back(progress.step, str(error))
            raise
        raise failure.Failed(folder.path, progress.step or None, remedy(error, run) or way_out(error)) from error


def make_checkpoints(run: Prepared) -> Checkpoints:
    """Those of the run's folder."""
    best, strategy = run.settings.checkpoint.best or run.task.best, run.strategy
    facts = {"strategy": strategy.name, "precision": run.machine.resolved_precision}
    return Checkpoints(run.folder.path / "checkpoints", strategy.world, run.settings.checkpoint.keep, best, facts)


def start_from(run: Prepared) -> Found | None:
    """Collective: what `run.resume` names: a checkpoint, or the newest of a run folder."""
    path, ranks = start_path(run.settings.run.resume), run.strategy.world
    if path is None:
        return None
    found = open_checkpoint(path, ranks) if is_checkpoint(path) else newest_in(path / "checkpoints", ranks)[0]
    # the best of another folder is not to be beaten here, so what was counted since is no matter
    return found and replace(found, state={**found.state, "progress": {**found.state["progress"], "stale": 0}})


def begin(run: Prepared, start: Found | None, changed: Sequence[str], log: Log) -> None:
    """Collective: write what this start is, and take back what an earlier one logged after the step to go on from."""
    strategy, folder, length = run.strategy, run.folder, run.length
    step = start.step if start else 0
    # what runs, then that it runs: whoever sees `running` finds the rest
    folder.write_start(run.configuration, run.words, describe(run))
    folder.begin(step, strategy.world.size, strategy.name)
    # what was logged after the step to go on from will be logged again
    log.open(folder.path, step, length.steps, -(-length.steps // length.per_epoch))
    log.text("configuration", run.configuration)
    for line in (*start_lines(run, start), *(f"changed     {one}" for one in changed)):
        log.say(line)


def make_trainer(run: Prepared, checkpoints: Checkpoints, log: Log, stop: StopRequest, progress: Progress) -> Trainer:
    """Collective: everything in its place."""
    settings, strategy, loop = run.settings, run.strategy, run.settings.loop
    loading, micro_batches = Loading(**vars(settings.loader)), run.batches.micro_batches
    stream = Stream(run.data, run.training, strategy.slice, loop.global_batch, micro_batches, loading)
    # an example of a batch: what is traced, cut or compiled must see the shapes of a micro-batch
    placed = strategy.build(run.task, run.network, stream.example())
    # the optimizer comes after the network is in its place: it steps what this rank owns by now
    groups = parameter_groups(placed.network, run.spare_vectors, run.rules)
    optimizer = placed.optimizer(run.make_optimizer, groups)
    if why := no_fused_step(optimizer, run.make_optimizer, strategy.device, settings.optimizer.fused):
        log.say(f"note        the optimizer's step is not fused here: {why}")
        optimizer = placed.optimizer(run.make_optimizer, [{**group, "fused": False} for group in groups])
    placed.keep_average(settings.ema.decay, settings.ema.every)
    # before the schedule, which multiplies the rates it finds
    for group in optimizer.param_groups:
        group["lr"] *= run.schedule.scale(loop.global_batch)
    return Trainer(
        strategy=strategy,
        placed=placed,
        task=run.task,
        optimizer=optimizer,
        schedule=run.schedule,
        stream=stream,
        evaluation=make_evaluation(run),
        checkpoints=checkpoints,
        log=log,
        report=run.folder.report,
        stop=lambda: stop.raised,
        steps=run.length.steps,
        horizon=run.length.steps,
        max_norm=loop.max_norm,
        log_due=Due(loop.log_every),
        eval_due=Due(loop.eval_every),
        save_due=Due(loop.save_every),
        facts={"configuration": read_config(run.configuration), "precision": run.machine.resolved_precision},
        patience=math.inf if loop.patience is None else loop.patience,
        stop_after=settings.run.stop_after,
        progress=progress,
        profile=make_profile(run),
    )


def make_evaluation(run: Prepared) -> EvaluationStream | None:
    """What an evaluation reads; None where there is nothing to evaluate on."""
    if run.evaluation is None:
        return None
    width, micro_batches = evaluation_batch(run.settings.loop), run.batches.micro_batches
    loading = Loading(**vars(run.settings.loader))
    return EvaluationStream(run.data, run.evaluation, run.strategy.slice, width, micro_batches, loading)


def make_profile(run: Prepared) -> NoProfile:
    """What traces the steps that were asked for."""
    window, strategy = run.settings.profile, run.strategy
    if window is None:
        return NoProfile()
    return Profile(*window, run.folder.path / "profile" / f"rank-{strategy.world.rank}.json", strategy.device)


def end(run: Prepared, trainer: Trainer, stop: StopRequest, done: bool) -> int:
    """Collective: say how it ended, in status.json first, which a launcher's end may cut off; the exit code."""
    launch, step, log = run.machine.launch, trainer.progress.step, trainer.log
    lost = not done and left_behind(launch, stop, run.strategy.world.all_gather_values)
    # all ranks; each hears what any was asked: one may have heard of it a second before the others do
    asked = [] if done else run.strategy.world.all_gather_values(stop.reason)
    why = next(filter(None, asked), f"run.stop_after={run.settings.run.stop_after or 0:g} s")
    early = f"{counted(trainer.progress.stale, 'evaluation')} in a row brought no better figure: loop.patience"
    ended = early if step < trainer.steps else None
    reason = ended if done else "another machine left the run" if lost else why
    run.folder.report("completed" if done else "preempted", step, reason)
    # all ranks; each has read other samples
    replaced = run.strategy.world.all_gather_values(run.data.replaced())
    # where the time went, now that all steps are done and no line is under way
    spent = trainer.placed.watch.line(ahead=run.strategy.device.type != "cpu")
    best = best_lines(trainer.checkpoints) if done else []
    last = end_lines(run, trainer.figures, step, done, ended)
    for line in (spent, *trainer.profile.close(), *replaced_lines(replaced), *best, *last):
        log.say(line)
    log.close()
    return failure.exit_code(done, launch, lost)
