"""A few steps of the loop as it is, recorded: what `verify` compares."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.jobs.batch_sizes import divide_batch, evaluation_batch_size
from trainer.jobs.build_trainer import make_checkpoints, make_evaluation, make_trainer
from trainer.jobs.plan_comparison import PlanComparison
from trainer.jobs.preparation import build_weights_on_main, read_data_sets, seeded_network, small_example
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.stop_signals import StopRequest
from trainer.learning.intervals import Interval, Trigger
from trainer.loop.evaluation import evaluate_batches
from trainer.loop.progress import Progress
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.mirror import NoMirror
from trainer.records.checkpoint.store import remove_checkpoint
from trainer.records.checkpoint.writer import AsyncSaver, checkpoint_path
from trainer.records.run_folder import RunFolder
from trainer.records.sinks import Log
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel
from trainer.verify.batch_dim_detection import LayoutDetector
from trainer.verify.fixed_randomness import USUAL_RANDOMNESS, UsualRandomness, disable_dropout
from trainer.verify.recorded_model import RecordedModel
from trainer.verify.training_record import Key, Phase, TrainingRecord, sketch_rows

_SCALE = 2.0**-8  # of the scale of losses in fp16, which begins at 2**16
_SAMPLES = 4  # of each micro-batch of a rank: more would show nothing new


class DeferredSaver(AsyncSaver):
    """It writes its copy only when somebody waits for it: after steps that change what it must be a copy of.

    is_read: will a later start read what is saved now? What nobody reads is copied, but not written: that is slow.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta, is_read: Callable[[], bool]) -> None:
        super().__init__(ranks, timeout)
        self._is_read = is_read
        self._work: Callable[[], None] | None = None

    def start(self, work: Callable[[], None]) -> bool:
        """Begin later, unless there is no room for a copy; not at all where nobody will read it."""
        if not self._is_read():
            return False
        if not self._has_memory:
            return super().start(work)
        self._work = work
        return False

    def wait(self) -> None:
        """Begin now, and wait until it is over; its error, once."""
        if self._work is not None:
            work, self._work = self._work, None
            super().start(work)
        super().wait()


class FirstBatchOnly:
    """An evaluation set that ends with its first batch: what an evaluation leaves behind, the steps after it show."""

    def __init__(self, stream: EvalLoader, width: int) -> None:
        self._stream, self.size = stream, min(stream.size, width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def batches(self, at: Sequence[int] | None = None) -> Iterator[tuple[Batch, int]]:
        """Its micro-batches."""
        return self._stream.batches(range(1))


def train_and_record(
    run: PreparedRun,
    record: TrainingRecord,
    ends: Sequence[int],
    stop: StopRequest,
    resume: int | None = None,
    shake: float = 0.0,
    randomness: UsualRandomness = USUAL_RANDOMNESS,
    name: str = "",
    evaluates: bool = True,
) -> bool:
    """Collective: train to each of these steps in turn, every time from the checkpoint of the last one.

    False where somebody asked to stop. resume: the step after which others resume. shake: how far, relative to itself,
    each weight is moved before the first step. randomness: what random numbers forwards get. name: tells it from others
    of its precision. evaluates: does a small evaluation follow each step, as one follows an epoch?
    """
    run = _in_own_folder(run, f"{run.machine.resolved_precision}{shake:g}{name}")

    def is_read() -> bool:
        return follows and trainer.progress.step == end  # the next part goes on from there

    with make_checkpoints(run, NoMirror(), partial(DeferredSaver, is_read=is_read)) as checkpoints:
        # saves when they are due alone: after better figures, what a save changes would look like the evaluation's
        vars(checkpoints)["is_best"] = lambda figures: False
        for part, end in enumerate(ends, 1):
            run, follows = fresh_run(run), part < len(ends)
            # everything as a start of a run makes it; the second part resumes from the first one's checkpoint
            start, evaluation, goal = checkpoints.newest(), make_evaluation(run), initial_progress(run, ends[-1])
            build_weights_on_main(run, start)
            trainer = make_trainer(run, checkpoints, Log([]), stop, goal, PlanComparison(run))
            if shake and start is None:
                perturb_weights(trainer.model.network, shake)
            _lower_loss_scale(trainer.model)
            recorded: Any = RecordedModel(trainer.model, record, resume or ends[0], randomness)
            if start is None:
                recorded.begin()
            # the loop itself, to this step; beside steps and saves it does no more than small evaluations
            between: Any = _small_evaluation(run, evaluation) if evaluates else None
            trainer.model, trainer.patience, trainer.eval_loader = recorded, math.inf, between
            # a step after the save that is read back: a copy of it that is none would change with the step. This step
            # is recorded, as is the same one after the resume: it shows what a save has changed in what goes on
            trainer.steps = min(end + 1, ends[-1])
            # a save before the last step, too: an average differs from the weights by then, if a save mixes them up
            saves = Interval(end), Interval(max(1, end - 1))
            trainer.eval_trigger, trainer.save_trigger = Trigger([Interval(1)]), Trigger(saves)
            if not trainer.fit(start):
                return False
            if trainer.steps > end:
                _discard(run, checkpoint_path(checkpoints.folder, trainer.steps))
    if evaluation is not None and record.wants(Phase.EVALUATION):
        _record_evaluation(run, recorded, evaluation, record, ends[-1])
    return True


def _small_evaluation(run: PreparedRun, evaluation: EvalLoader | None) -> FirstBatchOnly | None:
    """The first batch of the evaluation alone, if there is one."""
    return None if evaluation is None else FirstBatchOnly(evaluation, evaluation_batch_size(run.settings.loop))


def _in_own_folder(run: PreparedRun, name: str) -> PreparedRun:
    """The run in a folder of its own: each trial goes on from its own checkpoints alone."""
    keep, place = replace(run.settings.checkpoint, keep=2), run.folder.path / name
    if run.strategy.world.is_main:
        (place / "checkpoints").mkdir(parents=True)
    return replace(run, settings=replace(run.settings, checkpoint=keep), folder=RunFolder(place))


def _discard(run: PreparedRun, checkpoint: Path) -> None:
    """Remove a checkpoint that is not to be read, if it was written: without a thread each is."""
    if run.strategy.world.is_main and checkpoint.is_dir():
        remove_checkpoint(checkpoint)


def _lower_loss_scale(model: ParallelModel) -> None:
    """Which steps of fp16 overflow, and are left out, depends on how a batch is divided: so small, none does."""
    scaler = model.scaler
    scaler.load({name: value * _SCALE for name, value in scaler.state().items() if name == "scaler/scale"})


def _record_evaluation(run: PreparedRun, recorded: Any, stream: EvalLoader, record: TrainingRecord, step: int) -> None:
    """Collective: record the metrics of some batches of the evaluation set."""
    recorded.settle()
    # a metric may go wrong in a later batch, and the last one may be smaller, with ranks that have no sample of it
    count = len(stream)
    for name, value in evaluate_batches(run.strategy, recorded, run.task, stream, compared_batches(count)).items():
        record.add(Key(step, Phase.EVALUATION, name), [0], sketch_rows(torch.tensor([[value]], dtype=torch.float64)))
    recorded.unsettle()


def compared_batches(count: int) -> list[int]:
    """The numbers of those that are compared of so many: the first, one in the middle, the last."""
    return sorted({0, count // 2, count - 1})


def detect_sample_layouts(run: PreparedRun) -> Any:
    """Where the samples of a batch lie in what each module gives: of a whole step, and of every other sample of it."""
    run = fresh_run(run)
    build_weights_on_main(run, None)
    sampler, batch_size = run.strategy.slice, run.settings.loop.global_batch
    # every other one, as the first of two ranks has them: there a sample stands at another place than in the whole
    samplers = sampler, replace(sampler, ranks=2)
    options = LoaderOptions(**vars(run.settings.loader))
    loaders = [TrainLoader(run.data, run.training, each, batch_size, 1, options) for each in samplers]
    sites = run.strategy.draw_sites(run.task, run.network, partial(small_example, run, run.training))
    model = run.strategy.build(run.task, run.network, loaders[0].example())
    model.rng.learn(sites)
    detector = LayoutDetector(model.network.named_modules(), run.strategy.data_group)
    for loader, each in zip(loaders, samplers, strict=True):
        batches = [batch._replace(span=range(0, batch_size, each.ranks)) for batch in next(iter(loader.epoch(0)))]
        with detector.listening(batches):
            model.forward_backward(batches, 0)
    # what is wrong under every strategy alike no comparison shows: so the task itself may ask the network
    batch = next(iter(loaders[0].epoch(0)))[0]
    if problem := run.task.examine(model.network.eval(), batch.inputs, batch.targets):
        raise Refusal(f"job=verify: {problem}")
    return detector.layouts()


@torch.no_grad()
def perturb_weights(network: nn.Module, by: float) -> None:
    """Move each weight by so much, relative to itself, up or down at random, in place."""
    generator = torch.Generator().manual_seed(0)
    for weight in network.parameters():
        weight.mul_(1 + by * (torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1).to(weight))


def initial_progress(run: PreparedRun, last: int) -> Progress:
    """Where in the data a trial begins: so late that an epoch ends before its last step, where the run has several."""
    batch = run.settings.loop.global_batch
    epoch = run.length.per_epoch  # steps
    # one step after the one that is resumed from, where there are so many: the resume is then within an epoch
    before = max(1, min(last // 2 + 1, last - 1))
    passed = max(0, epoch - before) * batch if run.length.steps > epoch else 0
    return Progress(position=passed, left_out=passed)


def fresh_run(run: PreparedRun) -> PreparedRun:
    """The same run as another start of it would be: what objects remember of an earlier trial is in no checkpoint."""
    run = replace(run, **run.make_anew())
    run.training, run.evaluation = read_data_sets(run)
    # a network that a strategy has built a model of cannot be used for another one
    run.network, run.whole_because = run.strategy.outline(partial(seeded_network, run))
    if run.machine.launch.is_main:
        run.initial.find(run.network)
    return run


def use_single_process(run: RunParts) -> None:
    """From now on one process does all of it as it is: one micro-batch, nothing recomputed, nothing compiled."""
    run.machine = replace(run.machine, compile=None)
    run.strategy = Strategy(machine=run.machine)
    run.settings = replace(run.settings, loop=replace(run.settings.loop, micro_batches=1, micro_batch=None))


def set_batch_size(run: RunParts, samples: int | None) -> int:
    """From now on a step has so many samples, in as many micro-batches as before; how many it has.

    None: four for each micro-batch of a rank, if the run has more, and as many left over as it has.
    """
    loop, ranks = run.settings.loop, run.strategy.data_ranks(run.machine.launch.world_size)
    count = divide_batch(loop.global_batch, ranks, loop.micro_batches, loop.micro_batch, loop.uneven).micro_batches
    few = _SAMPLES * ranks * count + loop.global_batch % (ranks * count)
    samples = samples or min(few, loop.global_batch)
    loop = replace(loop, global_batch=samples, micro_batches=count, micro_batch=None)
    run.settings = replace(run.settings, loop=loop)
    return samples


@contextmanager
def computing_in(run: RunParts, precision: str) -> Iterator[None]:
    """Inside this context all is computed in this precision, and nothing is narrower on its way."""
    machine, narrow = replace(run.machine, precision=precision), dict.fromkeys(run.strategy.narrowing)
    with temporary_attributes(run, machine=machine), temporary_attributes(run.strategy, machine=machine, **narrow):
        yield


@contextmanager
def temporary_attributes(holder: Any, **fields: Any) -> Iterator[None]:
    """Inside this context an object has these attributes; afterwards those it had before."""
    before = {name: getattr(holder, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def remove_dropout(run: RunParts) -> Callable[[], int]:
    """From now on networks are made with no dropout, unless what it leaves out is each sample's own.

    What is given back tells how many layers had some.
    """
    make, dropped, settings = run.make_network, [0], run.settings
    # the reference must come to the same answer from the same words
    native = settings.loop.dropout == "native"

    def make_without() -> nn.Module:
        network = make()
        dropped[0] = disable_dropout(network) if native else 0
        return network

    run.make_network = make_without
    return lambda: dropped[0]


@contextmanager
def hide_other_processes() -> Iterator[None]:
    """Inside, code that asks torch or the environment for other processes learns of none."""
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "SLURM_NTASKS")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    answers: dict[str, Any] = {
        "is_initialized": lambda: False,
        "get_rank": lambda *_: 0,
        "get_world_size": lambda *_: 1,
    }
    with patch.dict(os.environ, environment, clear=True), patch.multiple(dist, **answers):
        yield
