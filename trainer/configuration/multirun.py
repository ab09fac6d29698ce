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

from trainer.configuration.choices import line
from trainer.configuration.compose import compose, composing, load, quoted
from trainer.configuration.words import Words, parse, read
from trainer.refusal import Refusal

_PLACE = ("run", "run.root", "run.name", "run.dir")  # all jobs share one folder
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
    root: str
    folder: str | None  # run.dir, or run.name below the root; None: a name is generated
    init_method: str  # where the processes meet
    launcher: str  # Hydra's name of it; basic: one job after the other, here
    composed: DictConfig  # with Hydra's own part, for launchers that are its plugins


def multirun(argv: Sequence[str]) -> Multirun:
    """Take the command line of several runs apart. Refusal that lists what is wrong with the words of any of them."""
    words = read(argv)
    overrides, problems = parse(words.overrides, sweeps=True)
    if problems:
        raise Refusal("\n".join(problems))
    of_hydra = [each for each in overrides if _OF_HYDRA.match(each.key_or_group)]
    with composing(words.folders) as places:
        # Of two words for one key the last one holds; an experiment's yaml may list values too, below both.
        last = {each.get_key_element(): each for each in overrides if each not in of_hydra}
        base = _base(words, list(last.values()), of_hydra, places)
        jobs, each_value = _jobs(words, list((_of_yaml(base) | last).values()), places)

    # Every mistake of any job is told before the first one starts.
    cfg = _checked(each_value)
    folder = cfg.run.dir if cfg.run.dir is not None else _below_root(cfg.run.root, cfg.run.name)
    launcher = base.hydra.runtime.choices["hydra/launcher"]
    return Multirun(jobs, cfg.run.root, folder, cfg.distributed.init_method, launcher, base)


def _base(words: Words, overrides: list[Override], of_hydra: list[Override], places: list[Path]) -> DictConfig:
    """The configuration with Hydra's own part, as the first values of the groups' words choose it."""
    # What decides who starts the runs cannot differ between them; groups may, and their first values stand for all.
    wrong = [line(each) for each in of_hydra if each.is_sweep_override()]
    if wrong:
        raise Refusal(f"{wrong[0]}: one launcher starts all runs; choose one")
    groups = [each for each in overrides if any((place / each.key_or_group).is_dir() for place in places)]
    chosen = [_values(each, places)[0] for each in groups]
    if any("submitit" in line(each) for each in of_hydra) and find_spec("submitit") is None:
        raise Refusal("hydra/launcher: submitit comes with pip install 'trainer[submitit]'")
    return load(words, [*chosen, *map(line, of_hydra)], places)


def _of_yaml(base: DictConfig) -> dict[str, Override]:
    """The words that an experiment's yaml adds under hydra.sweeper.params; they may do what a yaml may."""
    added, problems = parse([f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()], sweeps=True)
    problems += [
        f"hydra.sweeper.params: only the command line can set {each.key_or_group}, but a yaml file does"
        for each in added
        if re.match(r"(trust|hydra)\b", each.key_or_group)
    ]
    if problems:
        raise Refusal("\n".join(problems))
    return {each.get_key_element(): each for each in added}


def _jobs(words: Words, overrides: list[Override], places: list[Path]) -> tuple[tuple[Job, ...], list[Job]]:
    """Every combination of values, the last word's changing fastest; and as few of them as have every value once."""
    values = [_values(each, places) for each in overrides]
    several = [each.is_sweep_override() for each in overrides]
    shared = [each.key_or_group for each, swept in zip(overrides, several, strict=True) if swept]
    if place := set(shared) & set(_PLACE):
        raise Refusal(f"{min(place)}: all runs share one folder, and each has a folder in it; give one value")

    # Each job's words are a command line of their own, folders of labs included.
    labs = [part for lab in words.folders for part in ("--config-dir", str(lab))]
    named = [] if words.config_name == "config" else ["--config-name", words.config_name]

    def job(number: int, picked: Sequence[str]) -> Job:
        # A folder is named by what differs; where nothing does, by all words but those that say where it is.
        telling = [word for word, swept in zip(picked, several, strict=True) if swept]
        telling = telling or [word for word in picked if not word.startswith("run.")]
        return Job(_folder_name(number, ",".join(telling)), (*labs, *named, *picked))

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
    key = override.get_key_element()
    value: Any = override.value()
    if isinstance(value, Glob):
        options = {file.stem for place in places for file in (place / override.key_or_group).glob("*.yaml")}
        if not (found := value.filter(sorted(options))):
            raise Refusal(f"{line(override)}: no option of {override.key_or_group} matches")
        return [f"{key}={option}" for option in found]
    try:
        found = [f"{key}={each}" for each in override.sweep_string_iterator()] if override.is_discrete_sweep() else []
    except HydraException as error:
        raise Refusal(f"{line(override)}: {error}") from error
    if not found:
        raise Refusal(f"{line(override)}: these values cannot be listed; write a,b,c or range(1,4)")
    return found


def _folder_name(number: int, words: str) -> str:
    """`<number>_<overrides>`, without what a path or a shell would read as something else."""
    return f"{number}_{re.sub(r'[^A-Za-z0-9._=,+-]+', '_', words)}"[:200].rstrip("_")


def _checked(jobs: list[Job]) -> DictConfig:
    """The configuration of the first of these jobs. Refusal with everything that is wrong with any of them."""
    composed, problems = [], []
    for job in jobs:
        try:
            composed.append(compose(job.words))
        except Refusal as refusal:
            problems += str(refusal).splitlines()
    if problems:
        raise Refusal("\n".join(dict.fromkeys(problems)))
    return composed[0]


def _below_root(root: str, name: str | None) -> str | None:
    if name is not None and (name in ("", ".", "..") or Path(name).name != name):
        raise Refusal(f"run.name={name}: a name is the name of one folder; for a path use run.dir")
    return None if name is None else str(Path(root) / name)


def whole_words(job: Job, folder: Path) -> list[str]:
    """The command line of one job, with its own folder."""
    # The folder of all runs was decided above; each has its own in it.
    kept = [word for word in job.words if not re.match(r"\+*run\.(dir|name)=", word)]
    return [*kept, f"run.dir={quoted(str(folder / job.name))}"]
