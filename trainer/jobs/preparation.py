"""All that happens before there is a process group: data, batch sizes, the network's shapes, the run folder.

What cannot work is refused here, so that it costs seconds and leaves no folder behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainer.data.data import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.data.rng import seed_all
from trainer.data.sampler import EpochOrder, RankSampler, dataset_size
from trainer.jobs.batch_sizes import compute_length, divide_batch
from trainer.jobs.initial_weights import InitialWeights
from trainer.jobs.resume_decision import identify_data, refuse_resume_from
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.failure import error_chain
from trainer.launch.store_collectives import run_one_per_node_first
from trainer.learning.freezing import freeze, refuse_frozen
from trainer.learning.optimizer import Roles, find_roles
from trainer.learning.optimizer_checks import refuse_coupled_steps, refuse_unusable_optimizer
from trainer.learning.parameter_patterns import Rule, resolve_rules
from trainer.learning.task import gathers_samples, refuse_metric_objects, refuse_task_parameters
from trainer.messages import Refusal
from trainer.parallel.float8_linear import refuse_no_float8_layers
from trainer.parallel.meta_model import all_in_state_dict, allocate_empty, is_meta_model
from trainer.parallel.ranks import all_or_none
from trainer.records.checkpoint.base_weights import base_of
from trainer.records.checkpoint.manifest import CheckpointInfo
from trainer.records.checkpoint.remote_copies import refuse_unknown_url
from trainer.records.profiler import refuse_profile_window
from trainer.records.sinks import implements


@dataclass(frozen=True)
class PreparedNetwork:
    """A network that its strategy can spread, and what was found out about it."""

    network: nn.Module  # without values where ranks are to hold shards of it
    whole_because: str  # why it has values in spite of that; empty as a rule
    rules: list[Rule]  # rates and decays of some of its parameters
    roles: Roles  # of parameters that the optimizer steps otherwise


def prepare(run: RunParts) -> PreparedRun:
    """Prepare a training: read the data, check the batch sizes, look at the network, open the run folder.

    Refusal where something is not there, does not divide evenly, or does not fit together.
    """
    settings, loop, launch = run.settings, run.settings.loop, run.machine.launch
    # what needs numbers and names alone is refused before a data set is downloaded
    refuse_unknown_url(settings.checkpoint.mirror)
    ranks = prepare_process(run)
    batches = divide_batch(loop.global_batch, ranks, loop.micro_batches, loop.micro_batch, loop.uneven)
    run.strategy.refuse_compile()
    run.strategy.refuse_shares(launch.world_size, loop.global_batch // ranks, batches.micro_batches, loop.uneven)
    # one process of each machine first: it may download, and the others find it done
    training, evaluation = run_one_per_node_first(launch, "data", lambda: read_data_sets(run))
    # the order of one epoch: data may leave samples out, or repeat them
    order = EpochOrder(run.data, training, settings.seed)
    refuse_unrepeatable_order(run.data, order)
    # of what the global batch must be a multiple, by the key that the user has set
    unit = ranks if loop.uneven else ranks * (batches.largest if loop.micro_batch else batches.micro_batches)
    length = compute_length(order.length, loop.global_batch, loop.epochs, loop.steps, unit)
    refuse_profile_window(settings.profile, length.steps)
    run.schedule.set_epoch_length(length.per_epoch)
    run.schedule.check(length.steps, length.per_epoch)
    refuse_missing_evaluation(run, evaluation)
    refuse_missing_sinks(run, evaluation)
    refuse_task_parameters(run.task)
    # the network last of what is made, for it may be large
    prepared = prepare_network(run, partial(small_example, run, training))
    network = prepared.network
    # two steps over a few numbers: does the optimizer compute at all?
    refuse_unusable_optimizer(network, run.make_optimizer)
    if run.strategy.divides_parameters and launch.world_size > 1:
        refuse_coupled_steps(network, run.make_optimizer, run.strategy.name)
    refuse_text_sample(run, network)
    # a run that cannot work leaves no folder behind: what it would begin with is looked at before
    identity = identify_data(run.data, training, order.length, evaluation) if launch.is_main else {}
    initial = InitialWeights(settings.init_from, run.best_metric)
    build = partial(seeded_network, run)
    folder = run.open_folder(
        lambda at: refuse_resume_from(at, network, run, length, identity) if at else initial.find(network, build)
    )
    return PreparedRun(
        **vars(run),
        **vars(prepared),
        training=training,
        evaluation=evaluation,
        batches=batches,
        length=length,
        initial=initial,
        folder=folder,
        data_identity=identity,
    )


def prepare_process(run: RunParts) -> int:
    """Set this process up for the run's numbers; returns how many data ranks there will be.

    Before anything touches CUDA. Refusal where the strategy cannot use so many processes.
    """
    if run.settings.loop.deterministic:
        use_deterministic_algorithms()
    return run.strategy.data_ranks(run.machine.launch.world_size)


def prepare_network(run: RunParts, example: Callable[[], tuple[Any, Any]]) -> PreparedNetwork:
    """The network as the strategy needs it before there is a group; Refusal where the strategy cannot spread it.

    example: makes one small batch on the host, for a strategy that must see a forward.
    """
    size = run.machine.launch.world_size
    # where ranks are to hold shards only shapes are made
    network, whole_because = run.strategy.outline(partial(seeded_network, run))
    refuse_frozen(network, run.settings.model.freeze)
    rules = resolve_rules(network, run.settings.optimizer.groups)
    if callable(getattr(type(run.task), "carry", None)):  # of older versions; in silence each state would be new
        raise Refusal(
            f"task: {type(run.task).__name__}.carry is not called any more. Keep the state of each stream in a buffer"
            " of the network, and let the data say which stream a sample belongs to. If carry is your own, rename it"
        )
    run.task.check(network)
    roles = find_roles(run.make_optimizer, network, run.task.plan(network))
    run.strategy.check(run.task, network, size)
    run.machine.refuse_network(network)
    if run.machine.float8:
        refuse_no_float8_layers(run.machine.float8, network, run.task.plan(network))
    refuse_metric_objects(run.task)
    if gathers_samples(run.task):
        run.strategy.refuse_outputs(f"{type(run.task).__name__}.gathered", size)
    run.strategy.refuse_forward(run.task, network, size, example)
    return PreparedNetwork(network, whole_because, rules, roles)


def use_deterministic_algorithms() -> None:
    """Use deterministic algorithms alone from now on; an operation that has none is an error. Before CUDA starts.

    torch.use_deterministic_algorithms: cuDNN chooses among such algorithms too, and does not try which one is fastest.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition
    torch.backends.cudnn.benchmark = False  # what is fastest differs from start to start
    torch.use_deterministic_algorithms(True)


def determinism_advice(error: BaseException) -> str:
    """What to do about an operation that has no deterministic algorithm; empty where that is not the error."""
    if not any("does not have a deterministic implementation" in str(cause) for cause in error_chain(error)):
        return ""
    return "loop.deterministic=true runs no operation whose bits may differ; do without this one, or set it to false."


def seeded_network(run: RunParts, add: int = 0) -> nn.Module:
    """The network as its constructor makes it from the seed, whatever the strategy; some of it may be frozen."""
    seed_all(run.settings.seed + add)  # Python, NumPy and torch
    network = run.make_network()
    for name, parameter in network.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise Refusal(
                f"model: {name} has no size before a first forward (nn.Lazy…); give its layer the size, or let a"
                " function that builds the network call it once"
            )
    return freeze(network, run.settings.model.freeze)


def build_weights_on_main(run: PreparedRun, start: CheckpointInfo | None) -> None:
    """Collective: where the network has no values the main rank builds them, to send them to all.

    Some come from `init_from`. Not where a checkpoint or a file will give them all: nobody builds what is overwritten.
    """
    base = base_of(start.state) if start else None

    def build() -> None:
        if base is not None:
            run.initial = InitialWeights.under(base, run.network, run.settings.init_from)
        # memory without values, which the file will fill, and the checkpoint
        stored = start is not None and all_in_state_dict(run.network)
        if is_meta_model(run.network) and (run.initial.is_complete or (base and stored)):
            allocate_empty(run.network, torch.device("cpu"), torch.device("cpu"))
        elif is_meta_model(run.network) and not stored:
            run.network = seeded_network(run)
        run.initial.load_into(run.network)  # nothing, in a run that goes on from a checkpoint that holds all

    if base is not None:
        # all ranks: is what the checkpoint does not hold still there?
        all_or_none(run.strategy.world, build if run.machine.launch.is_main else lambda: None, Refusal)
    elif run.machine.launch.is_main:
        build()


def small_example(run: RunParts, training: Any, count: int = 2) -> tuple[Any, Any]:
    """So many samples as (inputs, targets) on the host, for who must see some before any rank knows its device."""
    single, loop = RankSampler(0, 1, torch.device("cpu"), run.settings.seed), run.settings.loop
    return TrainLoader(run.data, training, single, loop.global_batch, 1, LoaderOptions(workers=0)).example(count)


def read_data_sets(run: RunParts) -> tuple[Any, Any]:
    """The training and the evaluation set, None if empty; random choices are the same on every rank."""
    seed_all(run.settings.seed)
    training, evaluation = run.data.train(), run.data.evaluation()
    return training, evaluation if evaluation is not None and dataset_size(evaluation) else None


def refuse_missing_evaluation(run: RunParts, evaluation: Any) -> None:
    """Refuse what goes by metrics where there are none, or only one, at the end."""
    best, patience, schedule = run.settings.checkpoint.best, run.settings.loop.patience, run.schedule
    by_best = [f"checkpoint.best={best}"] if best is not None else []
    by_several = [f"loop.patience={patience}"] if patience is not None else []
    by_several += [f"schedule={schedule.label}"] if schedule.needs_figures else []
    # the first of them is enough for a message
    for what in [*by_best, *by_several] if evaluation is None else []:
        raise Refusal(f"{what}: the data has no evaluation set to measure it on")
    for what in by_several if not run.settings.loop.eval_every else []:
        raise Refusal(f"{what} counts evaluations, and loop.eval_every=null leaves one, at the end; use 1ep, or steps")


def refuse_text_sample(run: RunParts, network: nn.Module) -> None:
    """Refuse to continue a text where the data, the network or the strategy cannot."""
    request, key = run.sample, f"sample.prompt={run.settings.sample.prompt}"
    if request is not None:
        request.refuse_data(key, run.data)
        request.refuse_network(key, network)
        run.strategy.refuse_alone(key)


def refuse_missing_sinks(run: RunParts, evaluation: Any) -> None:
    """Refuse histograms and samples that nobody would show."""
    if run.sample is not None and not any(implements(sink, "sample") for sink in run.sinks):
        raise Refusal("sample.prompt: none of the run's sinks shows texts; log=[console,tensorboard] does")
    if run.sample is not None and evaluation is None:
        raise Refusal("sample.prompt: a sample is written after each evaluation, and the data has no evaluation set")
    if run.settings.loop.histograms_every and not any(implements(sink, "histograms") for sink in run.sinks):
        raise Refusal("loop.histograms_every: none of the run's sinks shows histograms; log=[console,tensorboard] does")


def refuse_unrepeatable_order(data: Data, order: EpochOrder) -> None:
    """Refuse an order that another generator decides: after a resume the samples would be others."""
    own = type(data).order is not Data.order
    if own and not torch.equal(order(0)[:], order(0)[:]):
        raise Refusal(
            f"{type(data).__name__}.order(0) is another one when it is asked for again: it must follow from the epoch"
            " and the generator that it is given, as torch.randperm(n, generator=generator) does. Else a resumed run"
            " reads other samples"
        )
