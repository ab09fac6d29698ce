"""What -m asks for: the words of each job, in Hydra's grammar of several values, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainer.configuration.choices import options
from trainer.configuration.compose import compose, composing, load, quoted
from trainer.configuration.trained import opens_a_run
from trainer.configuration.words import Words, line, parse, read
from trainer.refusal import Refusal

_PLACE = {"run", "run.root", "run.name", "run.dir"}  # all jobs share one folder
_OF_HYDRA = re.compile(r"hydra[./](mode|launcher|sweeper)\b")


@dataclass(frozen=True)
class Job:
    """One run of several: the name of its folder, and the words that make it."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Multirun:
    """Several runs, where they go, and who starts them."""

    jobs: tuple[Job, ...]
    root: str  # run.root, run.name and run.dir, which the jobs share
    name: str | None
    dir: str | None
    init_method: str  # where the processes meet
    composed: DictConfig  # Hydra's own part, for launchers that are its plugins

    @property
    def launcher(self) -> str:
        """Hydra's name of who starts the runs; basic: one after the other, here."""
        return self.composed.hydra.runtime.choices["hydra/launcher"]


def multirun(argv: Sequence[str]) -> Multirun:
    """Take the command line of several runs apart. Refusal that lists what is wrong with the words of any of them."""
    words = read(argv)
    overrides, problems = parse(words.overrides, sweeps=True)
    if problems:
        raise Refusal("\n".join(problems))
    of_hydra = [each for each in overrides if _OF_HYDRA.match(each.key_or_group)]
    with composing(words.folders) as places:
        # An experiment's yaml may list values, too. Of two words for one key the last holds, the command line's here.
        chosen = [each for each in overrides if each.key_or_group == "experiment" and not each.is_sweep_override()]
        composed = _of_hydra(words, [*chosen, *of_hydra], places)
        last = {each.get_key_element(): each for each in [*_of_yaml(composed), *overrides] if each not in of_hydra}
        jobs, each_value = _jobs(words, list(last.values()), places)

    # Every mistake of any job is told before the first one starts.
    cfg = _checked(each_value)
    return Multirun(jobs, cfg.run.root, cfg.run.name, cfg.run.dir, cfg.distributed.init_method, composed)


def _of_hydra(words: Words, overrides: list[Override], places: list[Path]) -> DictConfig:
    """A configuration with Hydra's own part, which says who starts the runs: that cannot differ between them."""
    if wrong := [line(each) for each in overrides if each.is_sweep_override()]:
        raise Refusal(f"{wrong[0]}: one launcher starts all runs; choose one")
    if any("submitit" in line(each) for each in overrides) and find_spec("submitit") is None:
        raise Refusal("hydra/launcher: submitit comes with pip install -e '.[submitit]'")
    return load(words, [line(each) for each in overrides], places)


def _of_yaml(composed: DictConfig) -> list[Override]:
    """The words that an experiment's yaml adds under hydra.sweeper.params; they may do what a yaml may."""
    listed = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
    # What is trusted and who starts processes decides which code runs: not for a file that others may have written.
    for word in listed:
        if re.match(r"[+~]*(trust|hydra)\b", word):
            raise Refusal(f"hydra.sweeper.params: only the command line can set {word}, but a yaml file does")
    added, problems = parse(listed, sweeps=True)
    if problems:
        raise Refusal("\n".join(problems))
    return added


def _jobs(words: Words, overrides: list[Override], places: list[Path]) -> tuple[tuple[Job, ...], list[Job]]:
    """Every combination of values, the last word's changing fastest; and as few of them as have every value once."""
    values = [_values(each, places) for each in overrides]
    several = [each.is_sweep_override() for each in overrides]
    if place := {each.key_or_group for each in overrides if each.is_sweep_override()} & _PLACE:
        raise Refusal(f"{min(place)}: all runs share one folder, and each has a folder in it; give one value")

    # Each job's words are a command line of their own, folders of labs included.
    labs = [part for lab in words.folders for part in ("--config-dir", str(lab))]
    named = [] if words.config_name == "config" else ["--config-name", words.config_name]

    def job(number: int, picked: Sequence[str]) -> Job:
        # A folder is named by what differs; where nothing does, by all words but those that say where it is.
        telling = [word for word, swept in zip(picked, several, strict=True) if swept]
        telling = telling or [word for word in picked if not word.startswith("run.")]
        # Without what a path or a shell would read as something else.
        name = f"{number}_{re.sub(r'[^A-Za-z0-9._=,+-]+', '_', ','.join(telling))}"[:200].rstrip("_")
        return Job(name, (*labs, *named, *picked))

    # To find every mistake each value need stand in one job only, not in every combination.
    most = max(map(len, values), default=1)
    return (
        tuple(job(number, picked) for number, picked in enumerate(product(*values))),
        [job(index, [one[index % len(one)] for one in values]) for index in range(most)],
    )


def _values(override: Override, places: list[Path]) -> list[str]:
    """The words that one word stands for. Refusal where they cannot be counted."""
    if not override.is_sweep_override():
        return [line(override)]
    key, value = override.get_key_element(), override.value()
    found: list[Any] = []
    try:
        found = value.filter(options(key, places)) if isinstance(value, Glob) else [*override.sweep_string_iterator()]
        why = f"no option of {key} matches"
    except HydraException:
        why = "these values cannot be listed; write a,b,c or range(1,4)"
    if not found:
        raise Refusal(f"{line(override)}: {why}")
    return [f"{key}={each}" for each in found]


def _checked(jobs: list[Job]) -> DictConfig:
    """The configuration of the first of these jobs. Refusal with everything that is wrong with any of them."""
    # As each run will compose itself, but in this process: what is wrong costs no start.
    composed, problems = [], []
    for job in jobs:
        try:
            composed.append(compose(job.words))
        except Refusal as refusal:
            problems += str(refusal).splitlines()
    if problems:
        raise Refusal("\n".join(dict.fromkeys(problems)))
    if opens_a_run(composed[0]):
        raise Refusal("-m trains several runs in one folder; a job that opens a run takes one run.dir: leave out -m")
    return composed[0]


def whole_words(job: Job, folder: Path) -> list[str]:
    """The command line of one job, with its own folder."""
    # The folder of all runs was decided above; each has its own in it.
    kept = [word for word in job.words if not re.match(r"\+*run\.(dir|name)=", word)]
    return [*kept, f"run.dir={quoted(str(folder / job.name))}"]
