"""What a run is made of, and what follows from it before any process group: data, sums, the network, the folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.configuration.schema import Settings
from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.data.rng import seed_all
from trainer.data.sampler import EpochOrder, RankSampler, dataset_size
from trainer.jobs.batch_sizes import Batches, Length, deal, measure
from trainer.jobs.determinism import be_deterministic
from trainer.jobs.initial_weights import Initial
from trainer.jobs.resume_precheck import known_sets, refuse_start
from trainer.jobs.run_parts import RunParts
from trainer.launch.store_collectives import run_one_per_node_first
from trainer.learning.freezing import freeze, refuse_frozen, refuse_parameters
from trainer.learning.optimizer_checks import refuse_step
from trainer.learning.parameter_groups import Rule, resolve_rules
from trainer.learning.task import Task, gathers_samples, is_recurrent, refuse_metric_objects
from trainer.learning.text_generation import GenerationRequest
from trainer.messages import Refusal
from trainer.parallel.meta_model import all_in_state_dict, allocate_empty, is_meta_model
from trainer.records.profiler import refuse_window
from trainer.records.run_folder import RunFolder
from trainer.records.sinks import shows


@dataclass
class Prepared(RunParts):
    """The same, and what follows from it before any process group: data, sums, the network, the folder."""

    training: Any
    evaluation: Any
    batches: Batches
    length: Length
    network: nn.Module  # without values where ranks are to hold shards of it
    whole_because: str  # why it has values there in spite of that; empty as a rule
    rules: list[Rule]  # rates and decays of some parameters of this network
    initial: Initial  # values that it begins with and that were not built; the main rank alone has them
    folder: RunFolder
    sets: dict[str, Any]  # how many samples, and which: to tell other data by

    @property
    def sharded(self) -> bool:
        """Do ranks hold shards of the network? Asked before it has values."""
        return is_meta_model(self.network) or bool(self.whole_because)

    @property
    def sample(self) -> GenerationRequest | None:
        """The text that is continued after each evaluation."""
        return sample(self.settings)


def prepare(run: RunParts) -> Prepared:
    """Read the data, do the sums, look at the network; Refusal where something is not there or not whole."""
    settings, loop, launch = run.settings, run.settings.loop, run.machine.launch
    if loop.deterministic:
        be_deterministic()
    # sums that need numbers alone first: they are refused before a data set is downloaded
    ranks = run.strategy.data_ranks(launch.world_size)
    batches = deal(loop.global_batch, ranks, loop.micro_batches, loop.micro_batch, loop.uneven)
    run.strategy.refuse_shares(launch.world_size, loop.global_batch // ranks, batches.micro_batches, loop.uneven)
    # one process of a machine first: it may download, and the others find it done
    training, evaluation = run_one_per_node_first(launch, "data", lambda: read_data(run))
    order = EpochOrder(run.data, training, settings.seed)
    unit = ranks if loop.uneven else ranks * (loop.micro_batch or loop.micro_batches)
    length = measure(order.length, loop.global_batch, loop.epochs, loop.steps, unit)
    refuse_window(settings.profile, length.steps)
    run.schedule.check(length.steps, length.per_epoch)
    refuse_unmeasured(run, evaluation)
    refuse_unshown(run, evaluation)
    refuse_shuffled(run.task, run.data)
    refuse_parameters(run.task)
    # the network last of what is made, for it may be large; where ranks are to hold shards only its shapes are
    network, whole_because = run.strategy.outline(partial(seeded_network, run))
    refuse_frozen(network, settings.model.freeze)
    rules = resolve_rules(network, settings.optimizer.groups)
    run.strategy.check(run.task, network, launch.world_size)
    refuse_figures(run)
    run.strategy.refuse_forward(run.task, network, launch.world_size, partial(host_example, run, training))
    refuse_step(network, run.make_optimizer)
    refuse_sample(run, network)
    # a run that cannot work leaves no folder behind: what it would begin with is looked at before
    sets = known_sets(run.data, training, order.length, evaluation) if launch.is_main else {}
    initial = Initial(settings.init_from, settings.checkpoint.best or run.task.best)
    folder = run.open_folder(
        lambda at: refuse_start(at, network, run.configuration, length, settings, sets) if at else initial.look(network)
    )
    return Prepared(
        **vars(run),
        training=training,
        evaluation=evaluation,
        batches=batches,
        length=length,
        network=network,
        whole_because=whole_because,
        rules=rules,
        initial=initial,
        folder=folder,
        sets=sets,
    )


def seeded_network(run: RunParts) -> nn.Module:
    """The network as its constructor makes it from the seed, whatever the strategy; some of it may be frozen."""
    seed_all(run.settings.seed)
    return freeze(run.make_network(), run.settings.model.freeze)


def build_values(run: Prepared, resuming: bool) -> None:
    """Where the network has no values the main rank builds them, to send them to all; some come from `init_from`.

    Not where a checkpoint or a file will give them all: nobody builds what is overwritten.
    """
    if not run.machine.launch.is_main:
        return
    if is_meta_model(run.network) and run.initial.gives_all:
        allocate_empty(run.network, torch.device("cpu"), torch.device("cpu"))
    elif is_meta_model(run.network) and not (resuming and all_in_state_dict(run.network)):
        run.network = seeded_network(run)
    run.initial.fill(run.network)  # of a run that goes on from a checkpoint nothing


def host_example(run: RunParts, training: Any) -> tuple[Any, Any]:
    """A small batch as (inputs, targets), for who must see one before any rank knows its device and its share."""
    own, loop = RankSampler(0, 1, torch.device("cpu"), run.settings.seed), run.settings.loop
    return TrainLoader(run.data, training, own, loop.global_batch, 1, LoaderOptions(workers=0)).example()


def read_data(run: RunParts) -> tuple[Any, Any]:
    """The training and the evaluation set, None if empty; what is drawn at random is the same on every rank."""
    seed_all(run.settings.seed)
    training, evaluation = run.data.train(), run.data.evaluation()
    return training, evaluation if evaluation is not None and dataset_size(evaluation) else None


def refuse_unmeasured(run: RunParts, evaluation: Any) -> None:
    """Refuse what goes by figures where there are none, or only one, at the end."""
    best, patience, schedule = run.settings.checkpoint.best, run.settings.loop.patience, run.schedule
    named = [f"checkpoint.best={best}"] if best is not None else []
    again = [f"loop.patience={patience}"] if patience is not None else []
    again += [f"schedule={schedule.label}"] if schedule.needs_figures else []
    for what in [*named, *again] if evaluation is None else []:
        raise Refusal(f"{what}: the data has no evaluation set to measure it on")
    for what in again if not run.settings.loop.eval_every else []:
        raise Refusal(f"{what} counts evaluations, and loop.eval_every=null leaves one, at the end; use 1ep, or steps")


def sample(settings: Settings) -> GenerationRequest | None:
    """The text that is to be continued after each evaluation; None: nobody asked for one."""
    asked = settings.sample
    if asked.prompt is None:
        return None
    return GenerationRequest(asked.prompt, asked.tokens, asked.temperature, asked.top_k)


def refuse_sample(run: RunParts, network: nn.Module) -> None:
    """Refuse to continue a text where the data, the network or its place cannot."""
    asked, word = sample(run.settings), f"sample.prompt={run.settings.sample.prompt}"
    if asked is not None:
        asked.refuse_data(word, run.data)
        asked.refuse_network(word, network)
        run.strategy.refuse_alone(word)


def refuse_unshown(run: RunParts, evaluation: Any) -> None:
    """Refuse histograms and samples that nobody would show."""
    if run.settings.sample.prompt is not None and not any(shows(sink, "sample") for sink in run.sinks):
        raise Refusal("sample.prompt: none of the run's sinks shows texts; log=[console,tensorboard] does")
    if run.settings.sample.prompt is not None and evaluation is None:
        raise Refusal("sample.prompt: a sample is written after each evaluation, and the data has no evaluation set")
    if run.settings.loop.histograms_every and not any(shows(sink, "histograms") for sink in run.sinks):
        raise Refusal("loop.histograms_every: none of the run's sinks shows histograms; log=[console,tensorboard] does")


def refuse_figures(run: RunParts) -> None:
    """Refuse figures that ranks cannot have together."""
    refuse_metric_objects(run.task)
    if gathers_samples(run.task):
        run.strategy.refuse_outputs(f"{type(run.task).__name__}.gathered", run.machine.launch.world_size)


def refuse_shuffled(task: Task, data: Data) -> None:
    """Refuse a state that would pass from one sample to another that has nothing to do with it."""
    if is_recurrent(task) and type(data).order is Data.order:
        raise Refusal(
            f"{type(task).__name__} carries a state from batch to batch, and the samples of {type(data).__name__} are"
            " shuffled: row i of a batch must go on where row i of the batch before ends. An order(self, epoch,"
            " generator) of the data says so; docs/extending.md shows one"
        )
