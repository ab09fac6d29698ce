"""`python -m trainer`: from words to a run. The only file that sees the whole configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer import bundle, failure
from trainer.launch import Launch
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config import Settings
    from trainer.fit import Parts
    from trainer.names import Names


def main() -> None:
    """Run the words of the command line; the process ends here, with an exit code that says how."""
    launch = Launch()
    try:
        launch = Launch.from_environment()
        code = run(sys.argv[1:], launch)
    except Refusal as refusal:
        failure.refuse(str(refusal), launch)
    except Exception as error:
        failure.fail(error, launch)
    failure.leave(code)


def run(words: Sequence[str], launch: Launch) -> int:
    """Compose, check, build, train; the exit code. Typos are refused before torch is imported."""
    from trainer.compose import compose, folders

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a lab is importable where its parent is the current folder
    cfg = compose(words)
    bundle.make_importable()

    from trainer.config import settings
    from trainer.fit import fit
    from trainer.names import Names

    chosen = settings(cfg)
    names = Names(trust=chosen.trust, folders=folders(words))
    return fit(assemble(cfg, chosen, names, words, launch))


def assemble(cfg: DictConfig, chosen: Settings, names: Names, words: Sequence[str], launch: Launch) -> Parts:
    """Turn every node into an object; what is not one yet (a network, an optimizer) into what makes it."""
    from datetime import timedelta

    from torch import nn
    from torch.optim import Optimizer

    from trainer.build import build, check, maker
    from trainer.config import OPTIMIZER_KEYS
    from trainer.data import Data
    from trainer.fit import Parts
    from trainer.folder import RunFolder
    from trainer.log import Sink
    from trainer.machine import Machine
    from trainer.optim import fused_words
    from trainer.resolved import written
    from trainer.schedule import Schedule
    from trainer.strategies.base import Strategy
    from trainer.task import Task

    machine = Machine(
        launch=launch,
        device=chosen.device,
        precision=chosen.precision,
        seed=chosen.seed,
        compile=chosen.compile,
        backend=chosen.distributed.backend,
        timeout=timedelta(seconds=chosen.distributed.timeout),
    )
    machine.check()
    check(cfg.model, nn.Module, "model", names)
    kind = names.find(cfg.optimizer._target_, "optimizer._target_")
    return Parts(
        settings=chosen,
        words=list(words),
        configuration=written(cfg),
        machine=machine,
        strategy=build(cfg.strategy, Strategy, "strategy", names, machine=machine),
        task=build(cfg.task, Task, "task", names),
        schedule=build(cfg.schedule, Schedule, "schedule", names),
        make_optimizer=maker(cfg.optimizer, Optimizer, "optimizer", names, OPTIMIZER_KEYS, **fused_words(kind, chosen.fused)),
        optimizer_kind=kind,
        sinks=[build(node, Sink, f"log.{name}", names) for name, node in cfg.log.items()],
        folder=RunFolder.open(**folder_words(chosen), launch=launch, label=label(cfg)),
        data=build(cfg.data, Data, "data", names),
        make_network=lambda: build(cfg.model, nn.Module, "model", names),
    )


def folder_words(chosen: Settings) -> dict[str, str | None]:
    """Where the run's folder is to be."""
    return {"root": chosen.run.root, "name": chosen.run.name, "dir": chosen.run.dir, "resume": chosen.run.resume}


def label(cfg: DictConfig) -> str:
    """What a generated name says about a run: its network and how it is spread."""
    return "_".join(str(cfg[group]._target_).rsplit(".", 1)[-1].lower() for group in ("model", "strategy"))


if __name__ == "__main__":
    main()
