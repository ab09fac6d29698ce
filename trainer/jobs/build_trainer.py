"""The Trainer of a prepared run: its loaders, parallel model, optimizer, checkpoints and logs."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.jobs.batch_sizes import evaluation_batch_size
from trainer.jobs.flops import make_utilization
from trainer.jobs.plan_comparison import PlanComparison
from trainer.jobs.preparation import small_example
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.stop_signals import StopRequest
from trainer.learning.freezing import frozen_names, has_adapters
from trainer.learning.intervals import Trigger
from trainer.learning.optimizer import EMPTY_ERROR, parameter_groups, why_not_fused
from trainer.learning.weight_switch import make_weight_switch
from trainer.loop.media_logging import MediaLogger, NoMediaLogger, NoTextSample, TextSample
from trainer.loop.progress import Progress
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal, expand_home
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.copies import name_below
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import FINITE_FACT, RESUME_KEYS
from trainer.records.checkpoint.mirror import CheckpointMirror, NoMirror
from trainer.records.checkpoint.writer import AsyncSaver, SyncSaver
from trainer.records.profiler import NoProfiler, StepProfiler
from trainer.records.resume_rules import parse_config
from trainer.records.sinks import Log, implements
from trainer.strategies.parallel_model import ParallelModel

_ALLOWED_FAILURES = {"stop": 0, "warn": 2}  # checkpoint.on_error → failed saves in a row after which a run goes on


def make_mirror(run: PreparedRun) -> NoMirror:
    """What copies the run's checkpoints elsewhere: on the main rank, where a URL says where."""
    options, folder = run.settings.checkpoint, run.folder
    if options.mirror is None or not run.machine.launch.is_main:
        return NoMirror()
    name = name_below(folder.given_path, expand_home(run.settings.run.root))
    return CheckpointMirror(options.mirror, name, folder.path / "checkpoints", options.keep, run.best_metric)


def make_checkpoints(
    run: PreparedRun,
    mirror: NoMirror,
    async_saver: Callable[[Ranks, timedelta], AsyncSaver] = AsyncSaver,
    kind: type[CheckpointManager] = CheckpointManager,
) -> CheckpointManager:
    """The checkpoints of the run's folder. async_saver: what writes them where training goes on meanwhile."""
    best, strategy = run.best_metric, run.strategy
    # the loop saves nothing else; those of versions before it did are looked through when they are read
    facts = {"strategy": strategy.name, "precision": run.machine.resolved_precision, FINITE_FACT: True}
    path, world, options = run.folder.path / "checkpoints", strategy.world, run.settings.checkpoint
    saver = async_saver(world, strategy.machine.timeout) if options.asynchronous else SyncSaver(world)
    return kind(path, world, options.keep, best, facts, RESUME_KEYS, _ALLOWED_FAILURES[options.on_error], saver, mirror)


def _leave_out_frozen(run: PreparedRun, network: nn.Module, checkpoints: CheckpointManager, log: Log) -> None:
    """Collective: checkpoints only say where frozen weights lie, if so wanted. The main rank decides."""
    frozen, whole = frozen_names(network), run.settings.checkpoint.whole
    leaves_out = frozen and run.machine.launch.is_main and (has_adapters(network) if whole is None else not whole)
    weights = {name: tensor for name, tensor in network.state_dict().items() if name in frozen}
    if size := checkpoints.begin_with(run.initial.base() if leaves_out else None, weights):
        log.say(f"note        every save writes the frozen weights again: {size:,} bytes")


def make_trainer(
    run: PreparedRun,
    checkpoints: CheckpointManager,
    log: Log,
    stop: StopRequest,
    progress: Progress,
    comparison: PlanComparison,
) -> Trainer:
    """Collective: build all that a loop needs, in the order in which one thing needs the other."""
    settings, strategy, loop = run.settings, run.strategy, run.settings.loop
    # the samples of this data rank, in micro-batches
    options, micro_batches = LoaderOptions(**vars(settings.loader)), run.batches.micro_batches
    train_loader = TrainLoader(run.data, run.training, strategy.slice, loop.global_batch, micro_batches, options)
    model, optimizer = build_model(run, train_loader.example(), log)
    _leave_out_frozen(run, model.network, checkpoints, log)
    comparison.begin(model.network)
    evaluation = make_evaluation(run)

    def report(state: str, step: int, reason: str | None = None) -> None:
        run.folder.report(state, step, reason)
        comparison.note(model.watch, ended=state != "running")

    return Trainer(
        strategy=strategy,
        model=model,
        task=run.task,
        optimizer=optimizer,
        schedule=run.schedule,
        train_loader=train_loader,
        eval_loader=evaluation,
        checkpoints=checkpoints,
        log=log,
        report=report,
        stop=lambda: stop.raised,  # by a signal, on this rank
        steps=run.length.steps,
        horizon=run.length.steps,  # for which the schedule computes rates
        max_norm=loop.max_norm,
        log_trigger=Trigger(loop.log_every),
        eval_trigger=Trigger(loop.eval_every),
        save_trigger=Trigger(loop.save_every),
        checkpoint_facts={
            "configuration": parse_config(run.configuration),
            "precision": run.machine.resolved_precision,
            "data": run.data_identity,  # the main rank's, which writes them
        },
        patience=math.inf if loop.patience is None else loop.patience,
        stop_after=settings.run.stop_after,
        progress=progress,
        profile=make_profile(run),
        media=make_media_logger(run, log),
    )


def build_model(run: PreparedRun, example: tuple[Any, Any], log: Log) -> tuple[ParallelModel, Optimizer]:
    """Collective: the parallel model and its optimizer.

    example: a micro-batch (inputs, targets): what is traced, cut or compiled must see its shapes.
    """
    utilization = make_utilization(run, example, log)  # while the network is whole, and all of one kind
    sites = run.strategy.draw_sites(run.task, run.network, partial(small_example, run, run.training))
    model = run.strategy.build(run.task, run.network, example)
    model.rng.learn(sites)
    model.work = utilization
    # the optimizer comes after the strategy: it steps what this rank owns by now
    optimizer = make_optimizer(run, model, log)
    model.switch = make_weight_switch(optimizer, model.deliver_weights)
    model.keep_average(run.settings.ema.decay, run.settings.ema.every)
    if run.settings.loop.on_nonfinite == "skip":  # a scaler around the scaler
        model.skip_broken_steps()
    return model, optimizer


def make_optimizer(run: PreparedRun, model: ParallelModel, log: Log) -> Optimizer:
    """The optimizer over what this rank owns, with the rates that the schedule multiplies."""
    groups, settings = parameter_groups(model.network, run.spare_vectors, run.rules, run.roles), run.settings
    try:
        optimizer = model.optimizer(run.make_optimizer, groups)
    except Refusal as error:
        if EMPTY_ERROR not in str(error):
            raise
        strategy, rank = run.strategy, run.strategy.world.rank
        raise Refusal(
            f"{error}. An optimizer inside of it would get nothing of what rank {rank} has, because"
            f" strategy={strategy.name} gives a rank some parameters only; strategy=ddp gives it all"
        ) from error
    # torch's fused step is tried on a few numbers: some optimizers, devices and dtypes have none
    if why := why_not_fused(optimizer, run.make_optimizer, run.strategy.device, settings.optimizer.fused):
        log.say(f"note        the optimizer's step is not fused here: {why}")
        optimizer = model.optimizer(run.make_optimizer, [{**group, "fused": False} for group in groups])
    # rates of the configuration are for the reference batch of the schedule
    for group in optimizer.param_groups:
        group["lr"] *= run.schedule.scale(settings.loop.global_batch)
    return optimizer


def make_evaluation(run: PreparedRun) -> EvalLoader | None:
    """What an evaluation reads; None where there is nothing to evaluate on."""
    if run.evaluation is None:
        return None
    # divided into as many micro-batches as a training batch
    batch, options = evaluation_batch_size(run.settings.loop), LoaderOptions(**vars(run.settings.loader))
    return EvalLoader(run.data, run.evaluation, run.strategy.slice, batch, run.batches.micro_batches, options)


def make_profile(run: PreparedRun) -> NoProfiler:
    """The profiler of the steps that were asked for."""
    window, strategy = run.settings.profile, run.strategy
    if window is None:
        return NoProfiler()
    return StepProfiler(*window, run.folder.path / "profile" / f"rank-{strategy.world.rank}.json", strategy.device)


def make_media_logger(run: PreparedRun, log: Log) -> NoMediaLogger:
    """What prepares images and histograms, where a sink shows any; all ranks know the sinks."""
    # gathering them is collective: all ranks must decide the same
    if not any(implements(sink, "images", "confusion", "histograms") for sink in run.sinks):
        return NoMediaLogger()
    # the continued text of a language model, after each evaluation
    sample = NoTextSample() if run.sample is None else TextSample(run.sample, run.data, log)
    return MediaLogger(run.data, run.strategy.world, log, Trigger(run.settings.loop.histograms_every), sample)
