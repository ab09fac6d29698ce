"""Launchers that are plugins of Hydra (submitit_slurm, submitit_local): a job's words are a program of their own there.

Hydra would hand a job its composed configuration. Here it is handed words, and starts `python -m trainer` with them, so
that a job is the same program wherever it runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from trainer.launch.child_processes import start_job_program
from trainer.launch.slurm_requeue import requeue_if_unfinished
from trainer.messages import Refusal, first_line


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
