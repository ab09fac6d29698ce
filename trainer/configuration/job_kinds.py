"""What a composed configuration asks for: which kind of job, and what must be known before it is built."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainer.configuration.schema import parse_settings
from trainer.launch.safe_files import resolve_links
from trainer.messages import expand_home

_RANGE_TEST = "trainer.jobs.range_test.RangeTest"
_TRAINING_JOBS = ("trainer.jobs.fit.Fit", "trainer.verify.job.Verify", _RANGE_TEST)


def opens_trained_run(cfg: DictConfig) -> bool:
    """Does the job begin with a checkpoint of a run, and so with that run's configuration?"""
    return OmegaConf.select(cfg, "job.checkpoint") is not None


def is_doctor_job(cfg: DictConfig) -> bool:
    """Does the job examine where a run would be? Then no part of a run is built for it."""
    return bool(cfg.job.get("_target_") == "trainer.jobs.doctor.job.Doctor")


def examined_folder(cfg: DictConfig) -> Path:
    """The folder that the job `doctor` examines and writes into: of all runs, or of the one that is named."""
    run = parse_settings(cfg).run
    path = run.dir if run.dir is not None else run.root if run.name is None else f"{run.root}/{run.name}"
    return resolve_links(expand_home(path))


def is_verification(cfg: DictConfig) -> bool:
    """Does the job compare a strategy with one process? Then it leaves the run's own files as they are."""
    return bool(cfg.job.get("_target_") == "trainer.verify.job.Verify")


def is_range_test(cfg: DictConfig) -> bool:
    """Does the job look for a learning rate? Then it leaves nothing in a run's folder, which may be of another run."""
    return bool(cfg.job.get("_target_") == _RANGE_TEST)


def open_keys(cfg: DictConfig, processes: int) -> list[str]:
    """The keys of a training on so many processes that say `auto`, which a plan decides before there is a group."""
    if opens_trained_run(cfg) or cfg.job.get("_target_") not in _TRAINING_JOBS:
        return []
    is_open = {
        # one process is `single`, whatever a plan says
        "strategy": processes > 1 and cfg.strategy.get("_target_") == "trainer.strategies.auto.auto",
        "loop.micro_batch": cfg.loop.micro_batch == "auto",
    }
    return [key for key, answer in is_open.items() if answer]
