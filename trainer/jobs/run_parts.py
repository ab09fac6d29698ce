"""What a run is made of, and how a configuration becomes it. Code below this file takes arguments, no configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.configuration.allowed_targets import AllowedTargets, qualified_name
from trainer.configuration.instantiate import DATA_FACTS, check_groups, fill_data_facts, instantiate, make_factory
from trainer.configuration.interpolation import to_yaml
from trainer.configuration.job_kinds import opens_trained_run
from trainer.configuration.schema import Settings, parse_settings
from trainer.data.data import Data
from trainer.jobs.batch_sizes import BatchSizes, RunLength
from trainer.jobs.initial_weights import InitialWeights
from trainer.launch.launcher_environment import apply_init_method
from trainer.launch.rendezvous import Launch
from trainer.launch.typed_values import read_yaml
from trainer.learning.generation_request import GenerationRequest
from trainer.learning.intervals import Cadences, Interval
from trainer.learning.optimizer import (
    Make,
    Roles,
    expose_inner_optimizers,
    fused_argument,
    make_trial_optimizer,
    refuse_rate,
    refuse_rules,
    should_spare_vectors,
    trains_other_weights,
)
from trainer.learning.optimizer_leaves import note_settings
from trainer.learning.parameter_patterns import Rule
from trainer.learning.schedule import Schedule, TorchSchedule
from trainer.learning.task import Task
from trainer.messages import Refusal, expand_home
from trainer.parallel.compile import CompileSettings
from trainer.parallel.meta_model import is_meta_model
from trainer.records.run_folder import RunFolder, refuse_unwritable
from trainer.records.sinks import Sink
from trainer.records.start_files import ConfigFields
from trainer.strategies.base import Strategy
from trainer.strategies.machine import Machine


class Job:
    """What a command does with a run; the group `job` names it, and its keys are the constructor's arguments."""

    def __call__(self, parts: RunParts) -> int:
        """Do it; the exit code. Refusal, before any process group, where it cannot be done."""
        raise NotImplementedError


@dataclass(frozen=True)
class AutoChoice:
    """What `strategy=auto` or `loop.micro_batch=auto` came to."""

    overrides: list[str]  # of the command line, which take the place of each auto
    reason: str  # one line for people
    processes: int
    planned: dict[str, float] | None = None  # `peak` in bytes; None: nothing was planned
    seconds: float = 0.0  # that it took to decide


@dataclass
class RunParts:
    """What a run is made of, as the configuration names it."""

    job: Job
    settings: Settings
    arguments: list[str]  # of the command line
    configuration: str  # yaml, without secrets
    unused_keys: Collection[str]  # of the configuration: without them the run would be the same
    machine: Machine
    strategy: Strategy
    task: Task
    data: Data
    schedule: Schedule
    make_anew: Callable[[], dict[str, Any]]  # task, data and schedule once more, as another start would make them
    make_network: Callable[[], nn.Module]
    make_optimizer: Make
    spare_vectors: bool  # biases and norms are not decayed
    sinks: list[Sink]
    open_folder: Callable[[Callable[[Path | None], None]], RunFolder]  # makes, locks it; before, a look at what begins
    auto: AutoChoice | None = field(default=None, kw_only=True)  # what keys came to that said auto; None: none did

    @property
    def best_metric(self) -> str:
        """The metric that marks the best checkpoint: the run's choice, else the task's; "-loss": less is better."""
        return self.settings.checkpoint.best or self.task.best

    @property
    def sample(self) -> GenerationRequest | None:
        """The text that is to be continued after each evaluation; None: nobody asked for one."""
        asked = self.settings.sample
        if asked.prompt is None:
            return None
        return GenerationRequest(asked.prompt, asked.tokens, asked.temperature, asked.top_k)


@dataclass
class PreparedRun(RunParts):
    """The parts, and what follows from them before there is a process group; `preparation.prepare` makes it."""

    training: Any
    evaluation: Any  # None where there is no such set, or nothing in it
    batches: BatchSizes
    length: RunLength
    network: nn.Module  # without values where ranks are to hold shards of it
    whole_because: str  # why it has values in spite of that; empty as a rule
    rules: list[Rule]  # rates and decays of some parameters of this network
    roles: Roles  # of parameters that the optimizer steps otherwise
    initial: InitialWeights  # values to begin with that were not built; only the main rank has them
    folder: RunFolder
    data_identity: dict[str, Any]  # what a resume tells other data by: samples, fingerprints, classes; main rank only

    @property
    def sharded(self) -> bool:
        """Do ranks hold shards of the network? Asked before it has values."""
        return is_meta_model(self.network) or bool(self.whole_because)


# The class that the node of a group must make.
_KINDS = {"job": Job, "strategy": Strategy, "model": nn.Module, "task": Task, "schedule": Schedule, "data": Data}


def assemble(cfg: DictConfig, arguments: Sequence[str], labs: Sequence[Path], launch: Launch) -> RunParts:
    """Turn every node into an object; what is not one yet (a network, an optimizer) into what makes it.

    labs: the folders of yaml files that the command line adds. Refusal where a node is not of its group's kind.
    """
    # the framework's own keys, all of them, before any name in a group is looked up
    settings = parse_settings(cfg)
    run, names = settings.run, AllowedTargets(trust=settings.trust, folders=tuple(labs))
    # on what they compute and where all meet: who is refused for it has built nothing yet
    machine = make_machine(settings, launch)
    if cfg.job.get("_target_") != "trainer.jobs.plan.job.PlanJob":  # a plan is for devices that need not be here
        machine.check()
    # before the first of them is called; what torch brings has no kind of ours, and is checked by its maker; what only
    # the data knows (a folder's classes) is any number until then
    kinds = {group: kind for group, kind in _KINDS.items() if not is_torch_scheduler(cfg[group], group, names)}
    unused_keys = check_groups(fill_data_facts(cfg, dict.fromkeys(DATA_FACTS, 1)), kinds, names)
    make_optimizer, spare_vectors = optimizer_maker(cfg.optimizer, settings, names)
    strategy = make_strategy(cfg.strategy, settings, names, machine)
    if not opens_trained_run(cfg):  # a trained run is only read, and may lie where nobody writes
        refuse_unwritable(run.root, run.name, run.dir, machine.launch)
    # the data before all that is told its facts
    data = instantiate(cfg.data, Data, "data", names)
    cfg = fill_data_facts(cfg, {name: getattr(data, name, None) for name in DATA_FACTS})
    machine.refuse_shared_devices()
    cfg = with_model_settings(cfg, arguments, names, run.dir or (f"{run.root}/{run.name}" if run.name else None))
    label = name_label(cfg, strategy)

    def make_learning() -> dict[str, Any]:
        schedule = make_schedule(cfg.schedule, make_optimizer, names)
        return {"task": instantiate(cfg.task, Task, "task", names), "schedule": schedule}

    return RunParts(
        job=instantiate(cfg.job, Job, "job", names),
        settings=settings,
        arguments=list(arguments),
        configuration=to_yaml(cfg),
        unused_keys=unused_keys,
        machine=machine,
        strategy=strategy,
        **make_learning(),
        make_anew=lambda: {**make_learning(), "data": instantiate(cfg.data, Data, "data", names)},
        make_optimizer=make_optimizer,
        spare_vectors=spare_vectors,
        sinks=[instantiate(node, Sink, f"log.{name}", names) for name, node in cfg.log.items()],
        open_folder=_folder_opener(settings, machine.launch, label),
        data=data,
        make_network=lambda: instantiate(cfg.model, nn.Module, "model", names),
    )


def _folder_opener(settings: Settings, launch: Launch, label: str) -> Callable[..., RunFolder]:
    """What opens the run's folder, given what looks at its beginning before."""
    run = settings.run
    return partial(RunFolder.open, run.root, run.name, run.dir, run.resume, settings.checkpoint.mirror, launch, label)


def with_model_settings(
    cfg: DictConfig, arguments: Sequence[str], names: AllowedTargets, run: str | Path | None
) -> DictConfig:
    """The configuration with the sizes that `model.settings` names: those in the config.json of a model's folder.

    The folder's name is gone then, as a resume must not need the folder. arguments: of the command line, whose keys
    count more. run: the run's folder, which still has the sizes after the model's folder is gone.
    """
    asked = cfg.model.get("settings")
    if asked is None:
        return cfg
    target: Any = names.import_target(cfg.model.get("_target_"), "model._target_")
    settings_of, folder = getattr(target, "settings_of", None), expand_home(str(asked))
    if not callable(settings_of):
        raise Refusal(
            f"model.settings={asked}: {qualified_name(target)} reads no config.json (it has no settings_of(folder,"
            " vocab_size)); model=gpt2 and model=llama do, and model=hf_classifier model.path=FOLDER"
        )
    stored = None if run is None else expand_home(str(run)) / "config.yaml"
    if not folder.is_dir() and stored is not None and stored.is_file():
        model = read_yaml(stored, ConfigFields)["model"]
        sizes = {key: value for key, value in model.items() if not key.startswith("_")}
    else:
        sizes = settings_of(folder, OmegaConf.select(cfg, "model.vocab_size"))
    overridden = {word.lstrip("+~").partition("=")[0].removeprefix("model.") for word in arguments if "model." in word}
    sizes = {key: value for key, value in sizes.items() if key not in overridden}
    return OmegaConf.merge(cfg, {"model": {**sizes, "settings": None}})  # type: ignore[return-value]


def is_torch_scheduler(node: DictConfig, group: str, names: AllowedTargets) -> bool:
    """Does the node name a scheduler of torch's?"""
    target: Any = names.import_target(node.get("_target_"), f"{group}._target_") if group == "schedule" else None
    return isinstance(target, type) and issubclass(target, LRScheduler)


def optimizer_maker(
    node: DictConfig, settings: Settings, names: AllowedTargets
) -> tuple[Callable[[Any], Optimizer], bool]:
    """A function from parameter groups to the optimizer, and whether its weight decay leaves out vectors."""
    # what its class can do is known before there are parameters to give it
    kind: Any = names.import_target(node.get("_target_"), "optimizer._target_")
    fused = fused_argument(kind, settings.optimizer.fused, node.get("dampening", 0))
    refuse_rate(node.get("lr", 0.0))
    refuse_rules(kind, settings.optimizer.groups)
    factory = make_factory(node, Optimizer, "optimizer", names, **fused)

    def make(groups: Any) -> Optimizer:
        optimizer: Any = expose_inner_optimizers(factory(groups))
        if trains_other_weights(optimizer):  # some are made as for an evaluation, and would not step
            optimizer.train()
        note_settings(optimizer)
        return optimizer

    decays = [node.get("weight_decay"), *(rule.weight_decay or 0.0 for rule in settings.optimizer.groups)]
    return make, any(should_spare_vectors(kind, amount, settings.optimizer.decay) for amount in decays)


def make_schedule(node: DictConfig, make_optimizer: Callable[[Any], Optimizer], names: AllowedTargets) -> Schedule:
    """The schedule that the node names; around a scheduler of torch's lies one of ours, with the keys of all."""
    if not is_torch_scheduler(node, "schedule", names):
        return instantiate(node, Schedule, "schedule", names)
    # some keys are ours, the others the scheduler's business
    values: Any = OmegaConf.to_container(node, resolve=True)
    keys = {field.name for field in fields(TorchSchedule)} & values.keys()
    make = make_factory(
        OmegaConf.create({key: values[key] for key in values.keys() - keys}), LRScheduler, "schedule", names
    )
    around = {"_target_": "trainer.learning.schedule.TorchSchedule", **{key: values[key] for key in keys}}
    # absolute numbers of a scheduler are compared with the rate that an optimizer is made with
    rate = make_trial_optimizer(make_optimizer).param_groups[0]["lr"]
    return instantiate(OmegaConf.create(around), Schedule, "schedule", names, make=make, rate=rate)


def make_machine(settings: Settings, launch: Launch) -> Machine:
    """On what this process computes, and how it meets the others."""
    timeout = timedelta(seconds=settings.distributed.timeout)
    return Machine(
        launch=apply_init_method(launch, settings.distributed.init_method, timeout),
        device=settings.device,
        precision=settings.precision,
        tf32=settings.tf32,
        float8=settings.float8,
        channels_last=settings.channels_last,
        seed=settings.seed,
        compile=CompileSettings(**vars(settings.compile)) if settings.compile.mode else None,
        dropout=settings.loop.dropout,
        backend=settings.distributed.backend,
        interface=settings.distributed.interface,
        timeout=timeout,
        step_timeout=min(timeout, timedelta(seconds=settings.distributed.step_timeout)),
        compare_copies=settings.distributed.compare_copies,
    )


def make_strategy(node: DictConfig, settings: Settings, names: AllowedTargets, machine: Machine) -> Strategy:
    """The strategy; it is told on what machine it runs, and how often the run logs, evaluates and saves."""
    strategy = instantiate(node, Strategy, "strategy", names, machine=machine)
    loop, ema = settings.loop, settings.ema
    average = () if ema.decay is None else (Interval(steps=ema.every),)
    strategy.cadences = Cadences(log=loop.log_every, evaluate=loop.eval_every, save=loop.save_every, average=average)
    return strategy


def name_label(cfg: DictConfig, strategy: Strategy) -> str:
    """The part of a generated run name that tells the network and the strategy: `vit_fsdp`."""
    return f"{str(cfg.model._target_).rsplit('.', 1)[-1].lower()}_{strategy.name}"
