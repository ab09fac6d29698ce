"""From a configuration to the parts of a run. The only file that sees the whole of it; below are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from trainer.configuration.build import build, check_all, maker
from trainer.configuration.names import Names
from trainer.configuration.resolved import written
from trainer.configuration.settings import Settings, settings
from trainer.data.data import Data
from trainer.launch.launch import Launch
from trainer.launch.launchers import meeting_at
from trainer.learning.optimizer import fused_words, refuse_rules, spares_vectors
from trainer.learning.schedule import Schedule
from trainer.learning.task import Task
from trainer.records.folder import RunFolder
from trainer.records.log import Sink
from trainer.run.preparation import RunParts
from trainer.strategies.base import Strategy
from trainer.strategies.machine import Machine

KINDS = {"strategy": Strategy, "model": nn.Module, "task": Task, "schedule": Schedule, "data": Data}


def assemble(cfg: DictConfig, words: Sequence[str], labs: Sequence[Path], launch: Launch) -> RunParts:
    """Turn every node into an object; what is not one yet (a network, an optimizer) into what makes it.

    labs: the folders of yaml files that the command line adds. Refusal where a node is not of its group's kind.
    """
    # the framework's own keys, all of them, before any name in a group is looked up
    chosen = settings(cfg)
    run, names = chosen.run, Names(trust=chosen.trust, folders=tuple(labs))
    # on what they compute and where all meet: who is refused for it has built nothing yet
    machine = make_machine(chosen, launch)
    machine.check()
    check_all(cfg, KINDS, names)  # before the first of them is called
    # what an optimizer's class can do is known before there are parameters to give it
    kind: Any = names.find(cfg.optimizer.get("_target_"), "optimizer._target_")
    fused = fused_words(kind, chosen.optimizer.fused, cfg.optimizer.get("dampening", 0))
    refuse_rules(kind, chosen.optimizer.groups)
    decays = [cfg.optimizer.get("weight_decay"), *(rule.weight_decay or 0.0 for rule in chosen.optimizer.groups)]
    return RunParts(
        settings=chosen,
        words=list(words),
        configuration=written(cfg),
        machine=machine,
        strategy=build(cfg.strategy, Strategy, "strategy", names, machine=machine),
        task=build(cfg.task, Task, "task", names),
        schedule=build(cfg.schedule, Schedule, "schedule", names),
        make_optimizer=maker(cfg.optimizer, Optimizer, "optimizer", names, **fused),
        spare_vectors=any(spares_vectors(kind, amount, chosen.optimizer.decay) for amount in decays),
        sinks=[build(node, Sink, f"log.{name}", names) for name, node in cfg.log.items()],
        open_folder=partial(RunFolder.open, run.root, run.name, run.dir, run.resume, machine.launch, label(cfg)),
        data=build(cfg.data, Data, "data", names),
        make_network=lambda: build(cfg.model, nn.Module, "model", names),
    )


def make_machine(chosen: Settings, launch: Launch) -> Machine:
    """Where this process computes, and among which others."""
    timeout = timedelta(seconds=chosen.distributed.timeout)
    return Machine(
        launch=meeting_at(launch, chosen.distributed.init_method, timeout),
        device=chosen.device,
        precision=chosen.precision,
        tf32=chosen.tf32,
        seed=chosen.seed,
        compile=chosen.compile,
        backend=chosen.distributed.backend,
        interface=chosen.distributed.interface,
        timeout=timeout,
        step_timeout=min(timeout, timedelta(seconds=chosen.distributed.step_timeout)),
    )


def label(cfg: DictConfig) -> str:
    """What a generated name says about a run: its network and how it is spread."""
    return "_".join(str(cfg[group]._target_).rsplit(".", 1)[-1].lower() for group in ("model", "strategy"))
