"""The configuration of a job that opens a trained run: the run's own, and on top of it the command line's words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from trainer.configuration.schema import GROUPS, settings
from trainer.launch.safe_files import resolve_links
from trainer.launch.validation import DamagedFile, read_json, read_yaml
from trainer.messages import Refusal, expand_home
from trainer.records.run_folder import ConfigFields, EnvironmentFields

# What is never taken over: what is to be done, where, with whose code, and sinks, which are for what is trained.
_OWN = ("job", "run", "processes", "trust", "log")


def opens_a_run(cfg: DictConfig) -> bool:
    """Does the job begin with a checkpoint of a run, and so with that run's configuration?"""
    return OmegaConf.select(cfg, "job.checkpoint") is not None


def reads_files(cfg: DictConfig) -> bool:
    """Does the job only read the files of a run? Then nothing is built for it, and torch is not imported."""
    return cfg.job.get("_target_") == "trainer.jobs.goodput_report.Report"


def reported_on(cfg: DictConfig) -> Path:
    """The folder that the job `report` reads. Refusal where no run is named."""
    run = settings(cfg).run
    if run.dir is None and run.name is None:
        raise Refusal("job=report reads the files of a run: add run.dir=FOLDER, the folder of that run")
    return resolve_links(expand_home(run.dir if run.dir is not None else f"{run.root}/{run.name}"))


def verifies(cfg: DictConfig) -> bool:
    """Does the job compare a strategy with one process? Then it leaves the run's own files as they are."""
    return bool(cfg.job.get("_target_") == "trainer.verify.job.Verify")


def makes_reference(cfg: DictConfig) -> bool:
    """Is there to be a reference, made by another process?"""
    return verifies(cfg) and cfg.job.get("reference") is None and cfg.job.get("record") is None


def of_run(cfg: DictConfig, chosen: Sequence[str], changes: Sequence[Override]) -> None:
    """Put the run's own values into what was composed, in place, but for the groups that were chosen anew.

    chosen, changes: the words that choose options, and those that change keys. Refusal where there is no such run.
    """
    said = {str(change.key_or_group): change.value() for change in changes}
    groups = {word.split("=")[0].lstrip("+~") for word in chosen}
    job = str(cfg.job.get("_target_")).rpartition(".")[2].lower()
    folder = _folder(cfg, said, job)
    if "experiment" in groups:
        raise Refusal(f"job={job} has the configuration of {folder}; leave experiment out, and change keys one by one")

    # a group's keys belong to what its option builds: of one that is chosen anew nothing of the run's is left
    for key, value in _read(folder).items():
        if key in GROUPS or not isinstance(value, dict):
            if key in cfg and key not in groups:
                cfg[key] = value
        elif key in cfg:
            # a key of another version of the framework has no meaning here
            cfg[key].update({name: inner for name, inner in value.items() if name in cfg[key]})
    cfg.run.dir, cfg.log = str(folder), cfg.log if "log" in groups else {}


def _folder(cfg: DictConfig, said: dict[str, Any], job: str) -> Path:
    """The run's folder, as run.dir or run.name says it."""
    root, name, path = said.get("run.root", cfg.run.root), said.get("run.name"), said.get("run.dir")
    if path is None and name is None:
        raise Refusal(f"job={job} opens a run that was trained: add run.dir=FOLDER, the folder of that run")
    folder = resolve_links(expand_home(str(path) if path is not None else f"{root}/{name}"))
    if not (folder / "config.yaml").is_file():
        there = "holds no config.yaml: it is no run folder" if folder.is_dir() else "does not exist"
        raise Refusal(f"job={job}: {folder} {there}")
    return folder


def _read(folder: Path) -> dict[str, Any]:
    """What the run was configured with; what it resolved `auto` to is kept, whatever this machine would choose."""
    environment = folder / "environment.json"
    try:
        own = read_yaml(folder / "config.yaml", ConfigFields)
        if own.get("precision") == "auto" and environment.is_file():
            own["precision"] = read_json(environment, EnvironmentFields)[0].get("precision", "auto")
    except DamagedFile as error:
        raise Refusal(f"the run cannot be opened, as one of its files is damaged: {error}") from error
    return {key: value for key, value in own.items() if key not in _OWN}
