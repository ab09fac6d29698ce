"""The job `fit`: train one network, from what was asked for to the last checkpoint."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer import failure
from trainer.agreement import decided_by_main, first_on_node
from trainer.arithmetic import Batches, Length, deal, measure, more_slices
from trainer.cadence import Due
from trainer.checkpoint import Checkpoints, Found, newest_in, open_checkpoint
from trainer.config import Settings
from trainer.data import Data
from trainer.folder import RunFolder
from trainer.launch import Launch
from trainer.log import Log, Sink
from trainer.machine import Machine
from trainer.optim import parameter_groups
from trainer.order import Order, size_of
from trainer.reader import Loading
from trainer.refusal import Refusal
from trainer.resume import changes, completed, is_checkpoint, learning_changes, read_config, refuse_changes, start_path
from trainer.schedule import Schedule
from trainer.signals import StopRequest
from trainer.strategies.base import Strategy
from trainer.stream import EvaluationStream, Stream
from trainer.surroundings import surroundings
from trainer.task import Task
from trainer.trainer import Progress, Report, Trainer

STOPPED = 75  # stopped as asked and saved: run the same command again


@dataclass
class Parts:
    """What a run is made of, as the configuration names it."""

    settings: Settings
    words: list[str]  # of the command line
    configuration: str  # yaml, without secrets
    machine: Machine
    strategy: Strategy
    task: Task
    data: Data
    schedule: Schedule
    make_network: Callable[[], nn.Module]
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    optimizer_kind: type[Optimizer]
    sinks: list[Sink]
    folder: RunFolder


@dataclass
class Plans:
    """What follows from the parts before any process group: data, sums, the network."""

    training: Any
    evaluation: Any
    batches: Batches
    length: Length
    network: nn.Module


def fit(parts: Parts) -> int:
    """Train; the exit code. Refusal, before any process group, where it cannot work."""
    plans = prepare(parts)
    verdict = decided_by_main(parts.machine.launch, "resume", lambda: decide_resume(parts, plans.length.steps))
    if verdict["complete"]:
        return say_complete(parts, verdict["complete"])
    launch, progress = parts.machine.launch, Progress()
    failure.redirect(launch.rank, parts.folder.path)
    log = Log(parts.folder.path, parts.sinks, launch.is_main)
    with accounted(parts, plans.batches, progress, log), StopRequest(launch, parts.folder.path) as stop, parts.strategy:
        return train(parts, plans, verdict["changed"], log, stop, progress)


@contextmanager
def accounted(parts: Parts, batches: Batches, progress: Progress, log: Log) -> Iterator[None]:
    """Where something fails inside, the process ends with an account of it."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        slices = more_slices(batches)
        remedy = f"Try loop.micro_batches={slices}." if slices else "A micro-batch holds one sample already."
        with suppress(Exception):
            log.close()
        failure.fail(
            error,
            parts.machine.launch,
            parts.folder.path,
            progress.step or None,
            memory_note=f"The device's memory ran out with {batches}. {remedy}",
        )


def prepare(parts: Parts) -> Plans:
    """Read the data, do the sums, build the network; Refusal where something is not there or not whole."""
    settings, launch = parts.settings, parts.machine.launch
    loop = settings.loop
    if loop.deterministic:
        torch.use_deterministic_algorithms(True)
    ranks = parts.strategy.data_ranks(launch.world_size)
    batches = deal(loop.global_batch, ranks, loop.micro_batches, loop.micro_batch)
    training, evaluation = first_on_node(launch, "data", lambda: (parts.data.train(), parts.data.evaluation()))
    order = Order(parts.data, training, settings.seed)
    length = measure(order.length, loop.global_batch, loop.epochs, loop.steps)
    evaluation = evaluation if evaluation is not None and size_of(evaluation) else None
    torch.manual_seed(settings.seed)  # one initialisation, whatever the strategy
    network = parts.make_network()
    parts.strategy.check(parts.task, network, launch.world_size)
    return Plans(training, evaluation, batches, length, network)


def decide_resume(parts: Parts, horizon: int) -> dict[str, Any]:
    """What to go on from, decided by the main rank: nothing, or what changed since. Refusal if that is too much."""
    folder, run = parts.folder, parts.settings.run
    verdict: dict[str, Any] = {"complete": None, "changed": []}
    before = folder.last_config
    if not folder.has_checkpoint or before is None:
        return verdict
    changed = changes(before, read_config(parts.configuration))
    last = folder.last_environment
    precision = (str(last["precision"]), parts.machine.resolved_precision) if "precision" in last else None
    horizons = (int(last["horizon"]), horizon) if "horizon" in last else None
    learning = learning_changes(changed, precision, horizons, parts.schedule.needs_horizon)
    if not run.accept_changes:
        refuse_changes(learning, folder.path)
    verdict["complete"] = completed(folder.last_status, horizon)
    verdict["changed"] = [str(one) for one in changed]
    return verdict


def say_complete(parts: Parts, line: str) -> int:
    """Nothing is left to do: say so, once."""
    if parts.machine.launch.is_main:
        print(f"{parts.folder.path}: {line}")
    return 0


def train(parts: Parts, plans: Plans, changed: list[str], log: Log, stop: StopRequest, progress: Progress) -> int:
    """Collective: place the network, find what to go on from, run the loop, say how it ended."""
    settings, strategy, folder = parts.settings, parts.strategy, parts.folder
    best = settings.checkpoint.best or parts.task.best
    facts = {"strategy": strategy.name, "precision": parts.machine.resolved_precision}
    checkpoints = Checkpoints(folder.checkpoints, strategy, settings.checkpoint.keep, best, facts)
    start = checkpoints.newest() or start_from(start_path(settings.run.resume), strategy)
    resume_step = start.step if start else 0
    report = partial(folder.status, resume_step=resume_step, world_size=strategy.world_size, strategy=strategy.name)
    folder.write_start(parts.configuration, parts.words, describe(parts, plans))
    report("running", step=resume_step)
    log.rewind(resume_step, plans.length.steps, -(-plans.length.steps // plans.length.per_epoch))
    log.text("configuration", parts.configuration)
    log.start([*start_lines(parts, plans, start), *[f"changed     {line}" for line in changed]])
    trainer = make_trainer(parts, plans, checkpoints, log, stop, progress, lambda state, at: report(state, step=at))
    done = trainer.fit(start)
    reason = None if done else stop.reason or f"run.stop_after={settings.run.stop_after:g} s"
    report("completed" if done else "preempted", step=progress.step, reason=reason)
    log.start(end_lines(parts, trainer.figures, progress.step, done))
    log.close()
    return leave_code(done, parts.machine.launch)


def leave_code(done: bool, launch: Launch) -> int:
    """The exit code: 75 for a run that stopped as asked, but 0 where a launcher would restart anything else.

    Who must know all the same names a file in TRAINER_EXIT_FILE; the main rank writes the code there.
    """
    meant = 0 if done else STOPPED
    if launch.is_main and (path := os.environ.get("TRAINER_EXIT_FILE")):
        Path(path).write_text(str(meant))
    return 0 if launch.restarts else meant


def make_trainer(
    parts: Parts,
    plans: Plans,
    checkpoints: Checkpoints,
    log: Log,
    stop: StopRequest,
    progress: Progress,
    report: Report,
) -> Trainer:
    """Collective: everything in its place."""
    settings, strategy = parts.settings, parts.strategy
    loop, loading = settings.loop, Loading(**vars(settings.loader))
    stream = Stream(parts.data, plans.training, strategy, loop.global_batch, plans.batches.slices, loading)
    width = loop.eval_batch or 4 * loop.global_batch
    evaluation = plans.evaluation and EvaluationStream(parts.data, plans.evaluation, strategy, width, loading)
    placed = strategy.build(parts.task, plans.network, stream.example())
    groups = parameter_groups(placed.network, parts.optimizer_kind, settings.decay)
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
    )


def start_from(path: Path | None, strategy: Strategy) -> Found | None:
    """Collective: what `run.resume` names: a checkpoint, or the newest of a run folder."""
    if path is None:
        return None
    return open_checkpoint(path, strategy) if is_checkpoint(path) else newest_in(path / "checkpoints", strategy)[0]


def describe(parts: Parts, plans: Plans) -> dict[str, Any]:
    """Collective: environment.json."""
    strategy, machine = parts.strategy, parts.machine
    facts = surroundings(strategy.name, strategy.world_size, machine.resolved_precision, machine.devices)
    hosts = sorted(set(strategy.share(socket.gethostname())))
    return {**facts, "hosts": hosts, "horizon": plans.length.steps}


def start_lines(parts: Parts, plans: Plans, start: Found | None) -> list[str]:
    """What a run is, as it was understood."""
    strategy, machine = parts.strategy, parts.machine
    count = sum(parameter.numel() for parameter in plans.network.parameters())
    samples = size_of(plans.evaluation) if plans.evaluation is not None else 0
    return [
        f"run folder  {parts.folder.path}",
        f"strategy    {strategy.name} on {strategy.world_size} process(es); {machine.devices}",
        f"precision   {machine.resolved_precision}",
        f"network     {type(plans.network).__name__}, {count:,} parameters",
        f"batch       {plans.batches}",
        f"length      {plans.length}; schedule {type(parts.schedule).__name__.lower()}",
        f"evaluation  {samples} samples" if samples else "evaluation  none: the data has no evaluation set",
        *[f"note        {note}" for note in strategy.notes(plans.network)],
        *([f"resuming    step {start.step} of {start.path}"] if start else []),
    ]


def end_lines(parts: Parts, figures: dict[str, float] | None, step: int, done: bool) -> list[str]:
    """How it ended, and what to do next."""
    folder = shlex.quote(str(parts.folder.path))
    if not done:
        return [f"stopped and saved at step {step}; to go on:", f"  {command(parts)}"]
    words = [f"{name} {value:.4f}" for name, value in (figures or {}).items() if name != "loss"]
    return [
        f"completed   step {step}" + (f", {', '.join(words)}" if words else ""),
        f"run folder  {folder}",
        f"curves      tensorboard --logdir {folder}/tensorboard",
    ]


def command(parts: Parts) -> str:
    """The command that continues this run."""
    launch = parts.machine.launch
    own = [word for word in parts.words if not word.startswith(("run.dir=", "run.name=", "run.resume="))]
    start = f"torchrun --nproc-per-node {launch.local_world_size}" if launch.world_size > 1 else "python"
    if launch.world_size == launch.local_world_size > 1:
        start = start.replace("torchrun", "torchrun --standalone")
    return f"{start} -m trainer {shlex.join([*own, f'run.dir={Path(parts.folder.path).absolute()}'])}"
