"""A run that was trained, loaded again: its network with the weights of a checkpoint, under any strategy.

Nothing above the job's own folder is written: the run may be training meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainer.data.class_names import read_class_names, refuse_other_classes
from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader
from trainer.data.rng import seed_all
from trainer.data.sampler import RankSampler, dataset_size
from trainer.jobs.batch_sizes import evaluation_batch_size, evaluation_micro_batches
from trainer.jobs.initial_weights import InitialWeights
from trainer.jobs.preparation import prepare_network, prepare_process, read_data_sets, seeded_network
from trainer.jobs.resume_decision import trained_class_names
from trainer.jobs.run_parts import RunParts
from trainer.launch import rank_output
from trainer.launch.hang_detection import make_watchdog
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import STATUS_FILE
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, resolve_links
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main, run_one_per_node_first
from trainer.messages import Refusal
from trainer.parallel.meta_model import all_in_state_dict, is_meta_model
from trainer.parallel.optimizer_state import refuse_checkpoint_shapes
from trainer.parallel.ranks import all_or_none
from trainer.records.checkpoint.base_weights import BaseWeights, base_of
from trainer.records.checkpoint.manifest import RESUME_KEYS, CheckpointInfo, CorruptCheckpoint, Manifest, read_state
from trainer.records.checkpoint.store import describe_damage, list_complete, open_checkpoint, select_best
from trainer.records.weight_sources import open_checkpoint_weights
from trainer.strategies.parallel_model import ParallelModel

Split = Literal["evaluation", "train"]
Which = Literal["best", "last"] | int  # or the step of a checkpoint

AVERAGE_PREFIX = "ema_"  # of the names of metrics of the moving average
_FEW = 16  # samples that are read sooner than worker processes have started
_TRIES = 3  # a run that goes on may remove a checkpoint while it is read


@dataclass(frozen=True)
class LoadedRun:
    """What a job works with."""

    model: ParallelModel
    samples: Any  # the data set that the loader reads
    loader: EvalLoader
    checkpoint: CheckpointInfo
    folder: Path  # the job's own
    stop: StopRequest
    classes: list[str]  # their names, as the checkpoint has them; none where it does not

    @property
    def epoch(self) -> int:
        """The epoch that the checkpoint's last step belongs to."""
        progress = self.checkpoint.state["progress"]
        return progress["epoch"] - (progress["position"] == 0 and progress["step"] > 0)


@contextmanager
def load_run(
    run: RunParts, job: str, which: Which, split: Split = "evaluation", inputs: str | None = None
) -> Iterator[LoadedRun]:
    """Collective: join the group, build the parallel model, load its weights. Refusal, before any group, if it cannot.

    job: the name of the job, and of its folder. split: the data set that is read; inputs: new files in its place.
    """
    launch, strategy = run.machine.launch, run.strategy
    prepare_process(run)
    # is there a checkpoint? its classes count: the data may have others
    classes = broadcast_from_main(launch, "checkpoint", lambda: checkpoint_class_names(run, which))
    samples = read_samples(run, split, launch, classes) if inputs is None else read_inputs(run, inputs)
    network = prepare_network(run, partial(evaluation_example, run, samples)).network

    # below the job's own folder, as a training's files lie below the run's
    folder = run_folder(run) / job
    broadcast_from_main(launch, "job-folder", lambda: refuse_unsafe_files(make_folder(folder)))
    rank_output.redirect_output(launch.rank, folder)
    _remove_status(launch, folder)
    stop = StopRequest(launch)
    # watched as an evaluation in training is; batches stand for steps
    with stop, make_watchdog(launch, folder, stop, lambda: strategy.pulse(strategy.watch.phases_done)), strategy:
        loader = make_eval_loader(run, samples)
        network, base = _with_outer_values(run, network, which)
        sites = strategy.draw_sites(run.task, network, partial(evaluation_example, run, samples))
        with torch.no_grad():  # nothing learns: its samples need not go through a forward of training
            model = strategy.build(run.task, network, loader.example())
        model.rng.learn(sites)
        # the average as well: its metrics are the run's own, and it may be what was asked for
        model.keep_average(run.settings.ema.decay, run.settings.ema.every)
        checkpoint = load_weights(run, model, which)
        if base_of(checkpoint.state) != base:
            raise Refusal(
                f"{checkpoint.path.name} has come meanwhile, and its frozen weights lie elsewhere; start the job again"
            )
        yield LoadedRun(model, samples, loader, checkpoint, folder, stop, classes)
    _remove_status(launch, folder)


def _with_outer_values(run: RunParts, network: nn.Module, which: Which) -> tuple[nn.Module, BaseWeights | None]:
    """Collective: the network, on the main rank with all values that no checkpoint holds; where frozen ones lie."""
    is_main = run.machine.launch.is_main

    def fill() -> tuple[nn.Module, BaseWeights | None]:
        base = base_of(_read_selected_state(run, which)) if is_main else None
        inside = base is None and all_in_state_dict(network)
        filled = seeded_network(run) if is_main and is_meta_model(network) and not inside else network
        if base is not None:
            InitialWeights.under(base, filled, run.settings.init_from).load_into(filled)
        return filled, base

    filled, base = all_or_none(run.strategy.world, fill, Refusal)
    return filled, run.strategy.world.broadcast_value(base)  # all ranks; a path, and a hash of each file


def _remove_status(launch: Launch, folder: Path) -> None:
    """A job has a status only if a rank hung: that of an earlier start goes, and one of a rank that was slow."""
    if launch.is_main:
        (folder / STATUS_FILE).unlink(missing_ok=True)


def run_folder(run: RunParts) -> Path:
    """The folder of the trained run."""
    return resolve_links(str(run.settings.run.dir))


# --- what is read ---


def read_samples(run: RunParts, split: Split, launch: Launch, classes: Sequence[str] = ()) -> Any:
    """The data set of this split; Refusal where there is none. Collective over these processes: one reads it first.

    classes: those that the run has learned. Refusal where the data has others.
    """
    refuse_other_classes(read_class_names(run.data), classes)

    def read() -> Any:
        if split == "evaluation":
            return read_data_sets(run)[1]
        seed_all(run.settings.seed)  # as where the run has read it
        return run.data.plain_train()  # without augmentation

    samples = run_one_per_node_first(launch, "data", read)
    if samples is None or not dataset_size(samples):
        raise Refusal("job.split=evaluation: the data has no evaluation set; there is job.split=train")
    return samples


def read_inputs(run: RunParts, where: str) -> Any:
    """The data set of these new inputs; Refusal where there are none. Collective: one process reads them first."""
    samples = run_one_per_node_first(run.machine.launch, "data", lambda: run.data.inputs(where))
    if not dataset_size(samples):
        raise Refusal(f"job.inputs={where}: there is nothing in it")
    return samples


def evaluation_example(run: RunParts, samples: Any, count: int = 2) -> tuple[Any, Any]:
    """At most so many of these samples as (inputs, targets) on the host, prepared as for an evaluation."""
    single = RankSampler(0, 1, torch.device("cpu"), run.settings.seed)
    return EvalLoader(run.data, samples, single, count, 1, LoaderOptions(workers=0)).example(count)


def make_eval_loader(run: RunParts, samples: Any) -> EvalLoader:
    """These samples in their order, in batches as the run evaluates them."""
    loop, loading = run.settings.loop, LoaderOptions(**vars(run.settings.loader))
    if dataset_size(samples) <= _FEW:
        loading = replace(loading, workers=0)
    batch, count = evaluation_batch_size(loop), evaluation_micro_batches(loop, run.strategy.slice.ranks)
    return EvalLoader(run.data, samples, run.strategy.slice, batch, count, loading)


# --- the checkpoint ---


def select_checkpoint(run: RunParts, which: Which) -> Manifest:
    """The checkpoint that is meant: the best, the last, or that of a step. Refusal with those that there are."""
    path = run_folder(run) / "checkpoints"
    manifests = list_complete(path)  # the newest first
    if not manifests:
        raise Refusal("\n  ".join([f"{path} holds no checkpoint that is whole", *describe_damage(path)]))
    if which == "best":
        return select_best(manifests, run.best_metric) or manifests[0]
    steps = {manifest.step: manifest for manifest in manifests}
    if which != "last" and which not in steps:
        raise Refusal(
            f"job.checkpoint={which}: there are best, last and the steps {', '.join(map(str, sorted(steps)))}"
        )
    return manifests[0] if which == "last" else steps[which]


def checkpoint_class_names(run: RunParts, which: Which) -> list[str]:
    """The names of the classes that this checkpoint was trained with; none where it does not say them."""
    return trained_class_names(_read_selected_state(run, which))


def _read_selected_state(run: RunParts, which: Which) -> dict[str, Any]:
    """What this checkpoint's state.json says."""
    for left in reversed(range(_TRIES)):
        manifest = select_checkpoint(run, which)
        try:
            return read_state(manifest)
        except CorruptCheckpoint as error:
            if manifest.path.exists() or not left:
                raise Refusal(str(error)) from None
    raise AssertionError  # not reached


def data_class_names(data: Data) -> list[str]:
    """The names of the data's classes; none where it has none, or where the data itself is not there any more."""
    try:
        return read_class_names(data)
    except Refusal:
        return []


def load_weights(run: RunParts, model: ParallelModel, which: Which) -> CheckpointInfo:
    """Collective: read the network's values, and their average; returns the checkpoint that they are of."""
    from trainer.records.checkpoint.tensor_files import load_tensors

    ranks = run.strategy.world
    for left in reversed(range(_TRIES)):
        # all ranks: the path that the main rank has chosen goes to everybody; each try looks anew
        path = Path(ranks.broadcast_value(str(select_checkpoint(run, which).path) if ranks.is_main else ""))
        try:
            checkpoint = open_checkpoint(path, ranks, RESUME_KEYS)
            tensors = model.empty_weights(checkpoint.tensors)
            all_or_none(ranks, partial(load_tensors, tensors, checkpoint), CorruptCheckpoint)
        except CorruptCheckpoint:
            there = ranks.broadcast_value(path.exists())  # all ranks; whether it is gone, as the main one sees it
            if there or not left:
                raise
        else:
            model.load_weights(tensors)
            return checkpoint
    raise AssertionError  # not reached


def load_network(run: RunParts, checkpoint: Path, average: bool, training: bool = False) -> nn.Module:
    """The plain network in this process's memory, with the values of a checkpoint; average: the moving average's.

    training: in that mode, for who writes its values to a file: eval() may merge weights. A network that learned by
    adapters says what it is without them, in a method `merged()`.
    """
    network = seeded_network(run)
    network = network.double() if run.machine.resolved_precision == "fp64" else network
    values = network.state_dict()
    # verified byte by byte; nothing is matched by guesses here, every name and shape must be the network's own
    weights = open_checkpoint_weights(checkpoint, average=average)
    refuse_checkpoint_shapes({name: value.shape for name, value in values.items()}, weights.tensors)
    if base := base_of(weights.checkpoint.state):
        InitialWeights.under(base, network, run.settings.init_from).load_into(network)
    weights.load_into(values)
    merged = getattr(network, "merged", None)
    return (merged() if callable(merged) else network).train(training)


def wants_average(run: RunParts, weights: Literal["plain", "ema"] | None) -> bool:
    """Is the moving average meant: by `job.weights`, or because the average marks the best checkpoint?"""
    by_best = run.best_metric.removeprefix("-").startswith(AVERAGE_PREFIX)
    average = weights == "ema" or (weights is None and by_best)
    if average and run.settings.ema.decay is None:
        raise Refusal("job.weights=ema: the run kept no moving average (ema.decay=null); there is job.weights=plain")
    return average
