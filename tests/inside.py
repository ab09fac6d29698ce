"""The command line's own path, taken inside this process or inside a rank of the group that stays: no launch to pay."""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import patch

import torch

from tests.commands import ROOT
from trainer.api import build_decided_run, run_doctor_job
from trainer.configuration.command_line import parse_command_line
from trainer.configuration.compose import compose
from trainer.configuration.job_kinds import is_doctor_job
from trainer.launch import failure
from trainer.launch.rendezvous import Launch
from trainer.records import folder_lock
from trainer.sweeps.sweep import run_sweep


def product(launch: Launch, place: Path, words: list[str]) -> int:
    """What `python -m trainer …` does in the folder `place`; the exit code. Leaves nothing switched on."""
    before, handlers, imported = os.getcwd(), logging.getLogger().handlers[:], set(sys.modules)
    os.chdir(place)
    try:
        words = ["device=cpu", "log=[]", *words]
        if parse_command_line(words).multirun:
            return run_sweep(words, launch)
        if is_doctor_job(cfg := compose(words)):
            return run_doctor_job(cfg, launch)
        run = build_decided_run(words, launch, cfg)
        with patch("trainer.jobs.fit.keep_freed_memory"):  # or all tests would keep what the largest network has freed
            return run.job(run)
    except failure.RunFailed as failed:
        raise failed.__cause__ or failed from None
    finally:
        os.chdir(before)
        for handler in set(logging.getLogger().handlers) - set(handlers):
            handler.close()  # a file that has been written to
        logging.getLogger().handlers[:] = handlers
        logging.captureWarnings(False)
        folder_lock.unlock_all_folders()  # the run's folder: its process would let go of it
        torch.use_deterministic_algorithms(False)
        _forget_lab(place, imported)


def _forget_lab(place: Path, imported: set[str]) -> None:
    """What was imported from `place` is found anew: the lab of another test has the same name."""
    for name in sys.modules.keys() - imported:
        found = getattr(sys.modules[name], "__spec__", None)
        lies = [found.origin, *(found.submodule_search_locations or ())] if isinstance(found, ModuleSpec) else []
        if place != ROOT and any(path and Path(path).is_relative_to(place) for path in lies):
            del sys.modules[name]


def here(*words: str) -> int:
    """The same for one process, in the present folder."""
    return product(Launch(), Path.cwd(), list(words))
