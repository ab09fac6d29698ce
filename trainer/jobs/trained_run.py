"""A run that was trained, opened again: its network, with the weights of a checkpoint, in any place.

Nothing above the job's own folder is written: the run may be training meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.data.class_names import read_class_names, renumber_classes
from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader
from trainer.data.rng import seed_all
from trainer.data.sampler import RankSampler, dataset_size
from trainer.jobs.allocator import evaluation_batch
from trainer.jobs.determinism import be_deterministic
from trainer.jobs.preparation import read_data, refuse_figures, seeded_network
from trainer.jobs.resume_precheck import known_classes
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
from trainer.parallel.ranks import all_or_none
from trainer.records.checkpoint.manifest import TO_RESUME, CorruptCheckpoint, Found, Manifest, read_state
from trainer.records.checkpoint.store import committed, damage, open_checkpoint, winner
from trainer.strategies.parallel_model import ParallelModel

Split = Literal["evaluation", "train"]
Which = Literal["best", "last"] | int  # or the step of one

OF_AVERAGE = "ema_"  # begins the name of its figures
_FEW = 16  # samples that are read sooner than worker processes have started
_TRIES = 3  # a run that goes on may remove a checkpoint while it is read


@dataclass(frozen=True)
class Opened:
    """What a job works with."""

    placed: ParallelModel
    samples: Any  # the set that the stream reads
    stream: EvalLoader
    found: Found  # the checkpoint
    folder: Path  # the job's own
    stop: StopRequest
    classes: list[str]  # their names, as the checkpoint has them; none where it does not

    @property
    def epoch(self) -> int:
        """The epoch that the checkpoint's last step belongs to."""
        progress = self.found.state["progress"]
        return progress["epoch"] - (progress["position"] == 0 and progress["step"] > 0)


@contextmanager
def opened(run: RunParts, job: str, which: Which, read: Callable[[list[str]], Any]) -> Iterator[Opened]:
    """Collective: join, place the network and give it its weights. Refusal, before any group, where that cannot be.

    read: (the names of the classes that the run has learned) → the set that is looked at.
    """
    launch, strategy, folder = run.machine.launch, run.strategy, run_folder(run)
    if run.settings.loop.deterministic:
        be_deterministic()
    # as a run is prepared, but for all that only training needs
    strategy.data_ranks(launch.world_size)
    # is there a checkpoint? its classes count: the data may have others, or others' numbers
    classes = broadcast_from_main(launch, "checkpoint", lambda: classes_of(run, which))
    samples = read(classes)
    network, _ = strategy.outline(partial(seeded_network, run))
    strategy.check(run.task, network, launch.world_size)
    refuse_figures(run)
    strategy.refuse_forward(run.task, network, launch.world_size, partial(evaluation_example, run, samples))

    # below the job's own folder, as the run's lie below the run's
    out = folder / job
    broadcast_from_main(launch, "job-folder", lambda: refuse_unsafe_files(make_folder(out)))
    rank_output.redirect_output(launch.rank, out)
    _forget_hang(launch, out)
    stop = StopRequest(launch)
    # watched as an evaluation in training is; batches stand for steps
    with stop, make_watchdog(launch, out, stop, lambda: strategy.pulse(strategy.watch.done)), strategy:
        stream = evaluation_stream(run, samples)
        if launch.is_main and is_meta_model(network) and not all_in_state_dict(network):
            network = seeded_network(run)  # some of its values are in no checkpoint
        placed = strategy.build(run.task, network, stream.example())
        # the average as well: its figures are the run's own, and it may be what was asked for
        placed.keep_average(run.settings.ema.decay, run.settings.ema.every)
        yield Opened(placed, samples, stream, give_weights(run, placed, which), out, stop, classes)
    _forget_hang(launch, out)


def _forget_hang(launch: Launch, out: Path) -> None:
    """A job has a status only if a rank hung: that of an earlier start goes, and one of a rank that was slow."""
    if launch.is_main:
        (out / STATUS_FILE).unlink(missing_ok=True)


def run_folder(run: RunParts) -> Path:
    """The folder of the run that is opened."""
    return resolve_links(str(run.settings.run.dir))


def samples_of(run: RunParts, split: Split, launch: Launch, classes: Sequence[str] = ()) -> Any:
    """The set that is meant; Refusal where there is none. Collective over these processes: one reads it first.

    classes: those that the run has learned; the numbers of the data, and of `run.data` from now on, become theirs.
    """
    run.data = renumber_classes(run.data, classes)

    def plain() -> Any:
        seed_all(run.settings.seed)  # as where the run has read it
        return run.data.plain_train()

    read = plain if split == "train" else lambda: read_data(run)[1]
    samples = run_one_per_node_first(launch, "data", read)
    if samples is None or not dataset_size(samples):
        raise Refusal("job.split=evaluation: the data has no evaluation set; there is job.split=train")
    return samples


def inputs_of(run: RunParts, where: str, launch: Launch, classes: Sequence[str] = ()) -> Any:
    """The set of these new inputs; Refusal where there are none. Collective: as `samples_of`."""
    samples = run_one_per_node_first(launch, "data", lambda: run.data.inputs(where))
    if not dataset_size(samples):
        raise Refusal(f"job.inputs={where}: there is nothing in it")
    return samples


def evaluation_example(run: RunParts, samples: Any) -> tuple[Any, Any]:
    """One or two of these samples as (inputs, targets) on the host, prepared as for an evaluation."""
    alone = RankSampler(0, 1, torch.device("cpu"), run.settings.seed)
    return EvalLoader(run.data, samples, alone, 2, 1, LoaderOptions(workers=0)).example()


def evaluation_stream(run: RunParts, samples: Any) -> EvalLoader:
    """These samples in their order, in batches as the run evaluates them."""
    loop, loading = run.settings.loop, LoaderOptions(**vars(run.settings.loader))
    if dataset_size(samples) <= _FEW:
        loading = replace(loading, workers=0)
    return EvalLoader(run.data, samples, run.strategy.slice, evaluation_batch(loop), loop.micro_batches, loading)


def chosen(run: RunParts, which: Which) -> Manifest:
    """The checkpoint that is meant; Refusal with those that there are."""
    path = run_folder(run) / "checkpoints"
    found = committed(path)
    if not found:
        raise Refusal("\n  ".join([f"{path} holds no checkpoint that is whole", *damage(path)]))
    if which == "best":
        return winner(found, best_figure(run)) or found[0]
    steps = {one.step: one for one in found}
    if which != "last" and which not in steps:
        raise Refusal(
            f"job.checkpoint={which}: there are best, last and the steps {', '.join(map(str, sorted(steps)))}"
        )
    return found[0] if which == "last" else steps[which]


def classes_of(run: RunParts, which: Which) -> list[str]:
    """The names of the classes that the meant checkpoint was trained with; none where it does not say them."""
    for left in reversed(range(_TRIES)):
        manifest = chosen(run, which)
        try:
            return known_classes(read_state(manifest))
        except CorruptCheckpoint as error:
            if manifest.path.exists() or not left:
                raise Refusal(str(error)) from None
    raise AssertionError  # not reached


def names_there(data: Data) -> list[str]:
    """The names of the data's classes; none where it has none, or where the data itself is not there any more."""
    try:
        return read_class_names(data)
    except Refusal:
        return []


def best_figure(run: RunParts) -> str:
    """What marks the best checkpoint: the run's word, else the task's."""
    return run.settings.checkpoint.best or run.task.best


def give_weights(run: RunParts, placed: ParallelModel, which: Which) -> Found:
    """Collective: read the network's values, and their average; the checkpoint that they are of."""
    from trainer.records.checkpoint.tensor_files import read_into

    ranks = run.strategy.world
    for left in reversed(range(_TRIES)):
        # the main rank's choice is everybody's; each try looks anew
        path = Path(ranks.all_gather_values(str(chosen(run, which).path) if ranks.is_main else "")[0])
        try:
            found = open_checkpoint(path, ranks, TO_RESUME)
            tensors = placed.empty_weights(found.tensors)
            all_or_none(ranks, partial(read_into, tensors, found), CorruptCheckpoint)
        except CorruptCheckpoint:
            there = ranks.all_gather_values(path.exists())[0]  # all ranks; whether it is gone, as the main one sees it
            if there or not left:
                raise
        else:
            placed.load_weights(tensors)
            return found
    raise AssertionError  # not reached


def as_average(run: RunParts, weights: Literal["plain", "ema"] | None) -> bool:
    """Is the moving average meant: by word, or because the best checkpoint is the one with the best average?"""
    asked = weights == "ema" or (weights is None and best_figure(run).removeprefix("-").startswith(OF_AVERAGE))
    if asked and run.settings.ema.decay is None:
        raise Refusal("job.weights=ema: the run kept no moving average (ema.decay=null); there is job.weights=plain")
    return asked
