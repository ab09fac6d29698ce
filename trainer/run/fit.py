"""The job `fit`: train one network, from what was asked for to the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from trainer.data.reader import Loading
from trainer.data.stream import EvaluationStream, Stream
from trainer.launch import failure
from trainer.launch.agreement import decided_by_main
from trainer.launch.departure import left_behind
from trainer.launch.launch import Launch
from trainer.launch.signals import StopRequest
from trainer.learning.cadence import Due
from trainer.learning.optimizer import parameter_groups
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint import Checkpoints, Found, newest_in, open_checkpoint
from trainer.records.log import Log
from trainer.records.profile import NoProfile, Profile
from trainer.records.resume import is_checkpoint, read_config, start_path
from trainer.refusal import Refusal
from trainer.run.malloc import keep_freed_memory
from trainer.run.preparation import Prepared, RunParts, decide_resume, keep_precision, prepare, with_values
from trainer.run.remedy import evaluation_batch, memory_note
from trainer.run.report import describe, end_lines, start_lines
from trainer.trainer import Progress, Report, Trainer

STOPPED = 75  # stopped as asked and saved: run the same command again


def fit(parts: RunParts) -> int:
    """Train; the exit code. Refusal, before any process group, where it cannot work."""
    keep_freed_memory()
    plans = prepare(parts)
    verdict = decided_by_main(parts.machine.launch, "resume", lambda: decide_resume(parts, plans))
    if verdict["complete"]:
        return say_complete(parts, plans, verdict["complete"])
    keep_precision(parts, verdict["precision"])
    launch, progress = parts.machine.launch, Progress()
    failure.redirect(launch.rank, plans.folder.path)
    log = Log(plans.folder.path, parts.sinks, launch.is_main)
    with accounted(parts, plans, progress, log), StopRequest(launch, plans.folder.path) as stop, parts.strategy:
        return train(parts, plans, verdict["changed"], log, stop, progress)


@contextmanager
def accounted(parts: RunParts, plans: Prepared, progress: Progress, log: Log) -> Iterator[None]:
    """Where something fails inside, the process ends with an account of it."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        with suppress(Exception):
            log.close()
        failure.fail(
            error,
            parts.machine.launch,
            plans.folder.path,
            progress.step or None,
            memory_note=memory_note(error, parts, plans),
        )


def say_complete(parts: RunParts, plans: Prepared, line: str) -> int:
    """Nothing is left to do: say so, once."""
    if parts.machine.launch.is_main:
        print(f"{plans.folder.path}: {line}")
    return 0


def train(parts: RunParts, plans: Prepared, changed: list[str], log: Log, stop: StopRequest, progress: Progress) -> int:
    """Collective: place the network, find what to go on from, run the loop, say how it ended."""
    settings, strategy, folder = parts.settings, parts.strategy, plans.folder
    best = settings.checkpoint.best or parts.task.best
    facts = {"strategy": strategy.name, "precision": parts.machine.resolved_precision}
    checkpoints = Checkpoints(folder.checkpoints, strategy.world, settings.checkpoint.keep, best, facts)
    start = checkpoints.newest() or start_from(start_path(settings.run.resume), strategy.world)
    resume_step = start.step if start else 0
    report = partial(folder.status, resume_step=resume_step, world_size=strategy.world_size, strategy=strategy.name)
    folder.write_start(parts.configuration, parts.words, describe(parts, plans))
    report("running", step=resume_step)
    owed = start is not None and start.state["progress"].get("owed") is not None  # an evaluation that was broken off
    log.rewind(resume_step, plans.length.steps, -(-plans.length.steps // plans.length.per_epoch), resume_step - owed)
    log.text("configuration", parts.configuration)
    log.start([*start_lines(parts, plans, start), *[f"changed     {line}" for line in changed]])
    plans = with_values(parts, plans, resuming=start is not None)
    trainer = make_trainer(parts, plans, checkpoints, log, stop, progress, lambda state, at: report(state, step=at))
    done = trainer.fit(start)
    lost = not done and left_behind(parts.machine.launch, stop, strategy.all_gather_values)
    reason = None if done else "another machine left the run" if lost else why(parts, stop)
    report("completed" if done else "preempted", step=progress.step, reason=reason)
    spent = trainer.placed.watch.line(ahead=strategy.device.type == "cuda")
    log.start([spent, *trainer.profile.close(), *end_lines(parts, plans, trainer.figures, progress.step, done)])
    log.close()
    return leave_code(done, parts.machine.launch, lost)


def why(parts: RunParts, stop: StopRequest) -> str:
    """Why a run stopped before its end, as far as this rank knows."""
    after = parts.settings.run.stop_after
    return stop.reason or (f"run.stop_after={after:g} s" if after is not None else "another rank was asked to stop")


def leave_code(done: bool, launch: Launch, lost: bool = False) -> int:
    """The exit code: 75 for a run that stopped as asked, but 0 where a launcher would restart anything else.

    `lost`: only other machines were asked, and the launcher is to start this one again. Who must know all the same
    names a file in TRAINER_EXIT_FILE; the main rank writes the code there.
    """
    meant = 0 if done else STOPPED
    if launch.is_main and (path := os.environ.get("TRAINER_EXIT_FILE")):
        Path(path).write_text(str(meant))
    return 0 if launch.restarts and not lost else meant


def make_trainer(
    parts: RunParts,
    plans: Prepared,
    checkpoints: Checkpoints,
    log: Log,
    stop: StopRequest,
    progress: Progress,
    report: Report,
) -> Trainer:
    """Collective: everything in its place."""
    settings, strategy = parts.settings, parts.strategy
    loop, loading = settings.loop, Loading(**vars(settings.loader))
    stream = Stream(parts.data, plans.training, strategy.slice, loop.global_batch, plans.batches.micro_batches, loading)
    evaluation = None
    if plans.evaluation is not None:
        width, micro_batches = evaluation_batch(loop), plans.batches.micro_batches
        evaluation = EvaluationStream(parts.data, plans.evaluation, strategy.slice, width, micro_batches, loading)
    placed = strategy.build(parts.task, plans.network, stream.example())
    groups = parameter_groups(placed.network, parts.spare_vectors)
    optimizer = placed.optimizer(parts.make_optimizer, groups)
    for group in optimizer.param_groups:
        group["lr"] *= parts.schedule.scale(loop.global_batch)
    return Trainer(
        strategy=strategy,
        placed=placed,
        task=parts.task,
        optimizer=optimizer,
        schedule=parts.schedule,
        stream=stream,
        evaluation=evaluation,
        checkpoints=checkpoints,
        log=log,
        report=report,
        stop=stop,
        steps=plans.length.steps,
        horizon=plans.length.steps,
        max_norm=loop.max_norm,
        log_due=Due(loop.log_every),
        eval_due=Due(loop.eval_every),
        save_due=Due(loop.save_every),
        state={"configuration": read_config(parts.configuration), "precision": parts.machine.resolved_precision},
        stop_after=settings.run.stop_after,
        progress=progress,
        profile=make_profile(parts, plans),
    )


def make_profile(parts: RunParts, plans: Prepared) -> NoProfile:
    """What traces the steps that were asked for."""
    window, strategy = parts.settings.profile, parts.strategy
    if window is None:
        return NoProfile()
    return Profile(*window, plans.folder.path / "profile" / f"rank-{strategy.rank}.json", strategy.device)


def start_from(path: Path | None, ranks: Ranks) -> Found | None:
    """Collective: what `run.resume` names: a checkpoint, or the newest of a run folder."""
    if path is None:
        return None
    return open_checkpoint(path, ranks) if is_checkpoint(path) else newest_in(path / "checkpoints", ranks)[0]
