"""Hydra's own keys, hydra/launcher and hydra/sweeper, and launchers that are plugins of Hydra (submitit_slurm, …).

Hydra would hand a job its composed configuration. Here it is handed words, and starts `python -m trainer` with them, so
that a job is the same program wherever it runs.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from trainer.configuration.command_line import CommandLine, override_text
from trainer.configuration.compose import compose_with_hydra
from trainer.configuration.key_types import Count, Natural, NonEmpty
from trainer.launch.child_processes import start_job_program
from trainer.launch.slurm_requeue import requeue_if_unfinished
from trainer.launch.typed_values import convert
from trainer.messages import Refusal, first_line

HYDRA_KEY = re.compile(r"hydra[./](mode|launcher|sweeper)\b")
_EXTRAS = {"optuna": "optuna", "submitit": "submitit"}  # a word that holds this needs the package of that name


@dataclass(frozen=True)
class Search:
    """What Optuna is asked for: `hydra/sweeper=optuna`."""

    n_trials: int  # runs in all, those of earlier commands included
    sampler: str  # a class of optuna.samplers
    seed: int  # of what it draws


def compose_hydra_section(
    command: CommandLine, experiments: list[Override], hydra_overrides: list[Override], config_dirs: list[Path]
) -> DictConfig:
    """A configuration with Hydra's own part, which says who starts the runs: that cannot differ between them.

    chosen: experiments, which may list values there and nothing else: launchers can run shell commands.
    """
    if swept := [override_text(override) for override in hydra_overrides if override.is_sweep_override()]:
        raise Refusal(f"{swept[0]}: one launcher starts all runs; choose one")
    for override in hydra_overrides:
        for name, package in _EXTRAS.items():
            if name in override_text(override) and find_spec(package) is None:
                raise Refusal(f"{override.key_or_group}: {package} comes with pip install -e '.[{package}]'")
    hydra_config = compose_with_hydra(
        command, [override_text(override) for override in [*experiments, *hydra_overrides]], config_dirs
    )
    typed = (
        compose_with_hydra(command, [override_text(override) for override in hydra_overrides], config_dirs)
        if experiments
        else hydra_config
    )
    if hydra_config.hydra.launcher != typed.hydra.launcher:
        raise Refusal("hydra.launcher: only the command line can set its keys, but a yaml file does")
    return hydra_config


def parse_search(hydra_config: DictConfig) -> Search | None:
    """What Optuna is asked for; None where nobody chooses. Refusal for sweepers that are plugins of Hydra."""
    sweeper = hydra_config.hydra.runtime.choices["hydra/sweeper"]
    if sweeper == "basic":
        return None
    if sweeper != "optuna":
        raise Refusal(f"hydra/sweeper={sweeper}: basic runs every combination, optuna chooses; no other works here")
    return Search(
        read_hydra_key(hydra_config, "hydra.sweeper.n_trials", Count),
        read_hydra_key(hydra_config, "hydra.sweeper.sampler", NonEmpty),
        read_hydra_key(hydra_config, "hydra.sweeper.seed", Natural),
    )


def read_hydra_key(hydra_config: DictConfig, key: str, kind: Any, default: Any = None) -> Any:
    value = OmegaConf.select(hydra_config, key, default=default)
    try:
        return convert(value, kind)
    except Refusal as expected:
        raise Refusal(f"{key}={value}: expected {expected}") from None


# -------------------------------------------------------------------------------------------- jobs of a launcher


def submit_to_launcher(cfg: DictConfig, jobs: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, float]]:
    """Hand each job's words to the launcher that the configuration chooses, and wait for all; exit codes and seconds.

    The launcher's own files (submitted code, output of its processes) go below the folder of all runs. Refusal where
    the plugin cannot start anything; what a job that is lost raises is the plugin's (hydra-submitit-launcher 1.2).
    """
    # its files are named by Hydra's own keys, which users cannot set here
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir = str(folder), "."
    # Hydra gives a launcher its context by this one way, which takes a loader of configurations and callbacks.
    try:
        context = HydraContext(config_loader=cast(ConfigLoader, FixedConfigLoader()), callbacks=Callbacks(None))
        launcher = Plugins.instance().instantiate_launcher(context, run_job, cfg)
    except (ImportError, RuntimeError) as error:
        raise Refusal(f"hydra/launcher: {first_line(error)}") from error
    # It returns when the last job has ended, with what run_words returned in each.
    returned = launcher.launch(cast(Any, [list(words) for words in jobs]), initial_job_idx=0)
    return [cast(Any, job.return_value) for job in returned]


class FixedConfigLoader:
    """Stands where a launcher asks Hydra to compose a job: its words are whole already."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Hydra's own part, with the words of this job in it."""
        # each job its own copy: launchers keep all of them until they submit
        config = deepcopy(master_config)
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = list(sweep_overrides)
        return config


def run_job(_: DictConfig) -> tuple[int, float]:
    """Where the job runs: start the program with its words and wait; its exit code, and the seconds that it took.

    submitit leaves by an exception once it has requeued a job before its time is over; the run saves first.
    """
    words = cast(list[str], OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":  # of Slurm's tasks rendezvous.py understands the environment
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    began = time.monotonic()
    # Slurm sends the signal for submitit to all processes; the run's own request is the SIGTERM that follows
    child = start_job_program(words, signal.SIGUSR2)
    try:
        code = child.wait()
    except BaseException:  # the requeueing, too: nothing may be left running
        child.terminate()
        child.wait()
        raise
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and requeue_if_unfinished(code):
        os._exit(code)  # without a result, for which the command that submitted the job goes on waiting
    return code, time.monotonic() - began
