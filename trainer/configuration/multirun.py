"""What -m asks for: the words of each run, in Hydra's grammar of several values, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainer.configuration.command_line import Words, line, parse, read
from trainer.configuration.compose import compose, composing, load, quoted
from trainer.configuration.key_types import Count, Natural, NonEmpty
from trainer.configuration.search_space import Axis, Between, Choice, Space, Trial
from trainer.configuration.suggestions import options
from trainer.configuration.trained_run_config import opens_a_run, reads_files
from trainer.launch.validation import convert
from trainer.messages import Refusal, join_problems

_PLACE = {"run", "run.root", "run.name", "run.dir"}  # all runs share one folder
_OF_HYDRA = re.compile(r"hydra[./](mode|launcher|sweeper)\b")
_EXTRAS = {"optuna": "optuna", "submitit": "submitit"}  # a word that holds this needs the package of that name


@dataclass(frozen=True)
class Search:
    """What Optuna is asked for: `hydra/sweeper=optuna`."""

    n_trials: int  # runs in all, those of earlier commands included
    sampler: str  # a class of optuna.samplers
    seed: int  # of what it draws


@dataclass(frozen=True)
class Multirun:
    """Several runs, where they go, and who starts them."""

    space: Space  # their words
    search: Search | None  # None: every combination of them is a run
    root: str  # run.root, run.name and run.dir, which the runs share
    name: str | None
    dir: str | None
    fresh: bool  # run.resume=fresh
    init_method: str  # where the processes meet
    plugin: str | None  # the launcher of Hydra that starts the runs; None: this very command
    at_once: int | Literal["auto"]  # how many runs this command keeps going; auto: as many as there are GPUs for
    device: str
    processes: int | str | None  # of each run
    composed: DictConfig  # Hydra's own part, for launchers that are its plugins


def multirun(argv: Sequence[str]) -> Multirun:
    """Take the command line of several runs apart. Refusal that lists what is wrong with the words of any of them."""
    words = read(argv)
    overrides, problems = parse(words.overrides, sweeps=True)
    if problems:
        raise Refusal(join_problems(problems))
    of_hydra = [each for each in overrides if _OF_HYDRA.match(each.key_or_group)]
    with composing(words.folders) as places:
        # An experiment's yaml may list values, too. Of two words for one key the last holds, the command line's here.
        chosen = [each for each in overrides if each.key_or_group == "experiment" and not each.is_sweep_override()]
        composed = _of_hydra(words, chosen, of_hydra, places)
        last = {each.get_key_element(): each for each in [*_of_yaml(composed), *overrides] if each not in of_hydra}
        space = _space(words, list(last.values()), places)
    search = _search(composed)
    if search is None:
        space.grid()  # what cannot be listed is refused here
    launcher = composed.hydra.runtime.choices["hydra/launcher"]
    plugin = None if launcher in ("local", "basic") else launcher

    # Every mistake of any run is told before the first one starts.
    cfg = _checked(space.samples())
    if search is not None and cfg.run.resume == "fresh":
        raise Refusal("run.resume=fresh: a search goes on with what its folder holds; give another run.name")
    return Multirun(
        space,
        search,
        cfg.run.root,
        cfg.run.name,
        cfg.run.dir,
        cfg.run.resume == "fresh",
        cfg.distributed.init_method,
        plugin,
        1 if plugin else _of_section(composed, "hydra.launcher.n_jobs", Count | Literal["auto"], 1),
        cfg.device,
        cfg.processes,
        composed,
    )


def _of_hydra(words: Words, chosen: list[Override], of_hydra: list[Override], places: list[Path]) -> DictConfig:
    """A configuration with Hydra's own part, which says who starts the runs: that cannot differ between them.

    chosen: experiments, which may list values there and nothing else: launchers can run shell commands.
    """
    if wrong := [line(each) for each in of_hydra if each.is_sweep_override()]:
        raise Refusal(f"{wrong[0]}: one launcher starts all runs; choose one")
    for each in of_hydra:
        for word, package in _EXTRAS.items():
            if word in line(each) and find_spec(package) is None:
                raise Refusal(f"{each.key_or_group}: {package} comes with pip install -e '.[{package}]'")
    composed = load(words, [line(each) for each in [*chosen, *of_hydra]], places)
    typed = load(words, [line(each) for each in of_hydra], places) if chosen else composed
    if composed.hydra.launcher != typed.hydra.launcher:
        raise Refusal("hydra.launcher: only the command line can set its keys, but a yaml file does")
    return composed


def _of_yaml(composed: DictConfig) -> list[Override]:
    """The words that an experiment's yaml adds under hydra.sweeper.params; they may do what a yaml may."""
    written = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
    # What is trusted and who starts processes decides which code runs: not for a file that others may have written.
    for word in written:
        if re.match(r"[+~]*(trust|hydra)\b", word):
            raise Refusal(f"hydra.sweeper.params: only the command line can set {word}, but a yaml file does")
    added, problems = parse(written, sweeps=True)
    if problems:
        raise Refusal(join_problems(problems))
    return added


def _search(composed: DictConfig) -> Search | None:
    """What Optuna is asked for; None where nobody chooses. Refusal for sweepers that are plugins of Hydra."""
    sweeper = composed.hydra.runtime.choices["hydra/sweeper"]
    if sweeper == "basic":
        return None
    if sweeper != "optuna":
        raise Refusal(f"hydra/sweeper={sweeper}: basic runs every combination, optuna chooses; no other works here")
    return Search(
        _of_section(composed, "hydra.sweeper.n_trials", Count),
        _of_section(composed, "hydra.sweeper.sampler", NonEmpty),
        _of_section(composed, "hydra.sweeper.seed", Natural),
    )


def _of_section(composed: DictConfig, key: str, kind: Any, default: Any = None) -> Any:
    value = OmegaConf.select(composed, key, default=default)
    try:
        return convert(value, kind)
    except Refusal as expected:
        raise Refusal(f"{key}={value}: expected {expected}") from None


def _space(words: Words, overrides: list[Override], places: list[Path]) -> Space:
    """What each word may be."""
    if place := {each.key_or_group for each in overrides if each.is_sweep_override()} & _PLACE:
        raise Refusal(f"{min(place)}: all runs share one folder, and each has a folder in it; give one value")
    # Each run's words are a command line of their own, folders of labs included.
    labs = [part for lab in words.folders for part in ("--config-dir", str(lab))]
    named = [] if words.config_name == "config" else ["--config-name", words.config_name]
    return Space((*labs, *named), tuple(_axis(each, places) for each in overrides))


def _axis(override: Override, places: list[Path]) -> Axis:
    """What one word may be. Refusal where it can be nothing."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return Choice(key, (line(override),))
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        log, whole = "log" in value.tags, isinstance(value.start, int) and isinstance(value.end, int)
        if not value.start < value.end or (log and value.start <= 0):
            raise Refusal(f"{line(override)}: the first number must be the smaller one{', above 0' if log else ''}")
        return Between(key, value.start, value.end, whole, log, line(override))
    found: list[Any] = []
    try:
        found = value.filter(options(key, places)) if isinstance(value, Glob) else [*override.sweep_string_iterator()]
        why = f"no option of {key} matches"
    except HydraException:
        why = "these values cannot be listed; write a,b,c or range(1,4)"
    if not found:
        raise Refusal(f"{line(override)}: {why}")
    return Choice(key, tuple(f"{key}={each}" for each in found))


def _checked(trials: Iterable[Trial]) -> DictConfig:
    """The configuration of the first of these runs. Refusal with everything that is wrong with any of them."""
    # As each run will compose itself, but in this process: what is wrong costs no start.
    composed, problems = [], []
    for trial in trials:
        try:
            composed.append(compose(trial.words))
        except Refusal as refusal:
            problems += str(refusal).splitlines()
    if problems:
        raise Refusal(join_problems([*dict.fromkeys(problems)]))
    if opens_a_run(composed[0]) or reads_files(composed[0]):
        raise Refusal("-m trains several runs in one folder; a job that opens a run takes one run.dir: leave out -m")
    return composed[0]


def whole_words(trial: Trial, folder: Path) -> list[str]:
    """The command line of one run, with its own folder."""
    # The folder of all runs was decided above; each has its own in it.
    kept = [word for word in trial.words if not re.match(r"\+*run\.(dir|name)=", word)]
    return [*kept, f"run.dir={quoted(str(folder / trial.name))}"]
