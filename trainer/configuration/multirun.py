"""What -m asks for: the words of each run, in Hydra's grammar of several values, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainer.configuration.command_line import CommandLine, override_text, parse_command_line, parse_overrides
from trainer.configuration.compose import compose, compose_with_hydra, open_config_dirs, quote_value
from trainer.configuration.job_kinds import is_doctor_job, opens_trained_run
from trainer.configuration.key_checks import list_options
from trainer.configuration.key_types import Count
from trainer.configuration.removed_words import removed_word
from trainer.launch.typed_values import convert
from trainer.messages import Refusal, join_problems

_HYDRA_KEY = re.compile(r"hydra[./](mode|launcher|sweeper)\b")
_RUN_FOLDER_KEYS = {"run", "run.root", "run.name", "run.dir"}  # all runs share one folder

# The words of a sweep: key → the words that it may be; as a rule one only.
Axes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Trial:
    """One run of several: its number, the name of its folder, the words that make it, and what differs in them."""

    number: int
    name: str
    words: tuple[str, ...]
    values: dict[str, str]


@dataclass(frozen=True)
class Multirun:
    """Several runs, where they go, and how many at a time."""

    trials: tuple[Trial, ...]
    root: str  # run.root, run.name and run.dir, which the runs share
    name: str | None
    dir: str | None
    fresh: bool  # run.resume=fresh
    init_method: str  # where the processes meet
    concurrency: int | Literal["auto"]  # how many runs this command keeps going; auto: as many as there are GPUs for
    device: str
    processes: int | str | None  # of each run


def parse_multirun(argv: Sequence[str]) -> Multirun:
    """Take the command line of several runs apart. Refusal that lists what is wrong with the words of any of them."""
    command = parse_command_line(argv)
    overrides, problems = parse_overrides(command.overrides, sweeps=True)
    if problems:
        raise Refusal(join_problems(problems))
    hydra_overrides = [override for override in overrides if _HYDRA_KEY.match(override.key_or_group)]
    with open_config_dirs(command.folders) as config_dirs:
        # An experiment's yaml may list values, too. Of two words for one key the last holds, the command line's here.
        experiments = [
            override
            for override in overrides
            if override.key_or_group == "experiment" and not override.is_sweep_override()
        ]
        hydra_config = _compose_hydra_section(command, [*experiments, *hydra_overrides], config_dirs)
        by_key = {
            override.get_key_element(): override
            for override in [*_yaml_sweep_overrides(hydra_config), *overrides]
            if override not in hydra_overrides
        }
        axes = _list_axes(list(by_key.values()), config_dirs)

    # Each run's words are a command line of their own, folders of labs included.
    common = [part for lab in command.folders for part in ("--config-dir", str(lab))]
    common += [] if command.config_name == "config" else ["--config-name", command.config_name]
    # the last word's values change fastest
    trials = tuple(_make_trial(number, words, axes, common) for number, words in enumerate(product(*axes.values())))
    # Every mistake of any run is told before the first one starts: as few runs as have every value once are composed.
    longest = max(map(len, axes.values()), default=1)
    cfg = _compose_all([(*common, *(words[at % len(words)] for words in axes.values())) for at in range(longest)])
    return Multirun(
        trials,
        cfg.run.root,
        cfg.run.name,
        cfg.run.dir,
        cfg.run.resume == "fresh",
        cfg.distributed.init_method,
        _read_concurrency(hydra_config),
        cfg.device,
        cfg.processes,
    )


def _compose_hydra_section(command: CommandLine, overrides: list[Override], config_dirs: list[Path]) -> DictConfig:
    """A configuration with Hydra's own part, which says how the runs are started: that cannot differ between them."""
    for override in overrides:
        if override.is_sweep_override():
            raise Refusal(f"{override_text(override)}: one launcher starts all runs; choose one")
        if gone := removed_word(override.key_or_group, override.value()):
            raise Refusal(gone)
    hydra_config = compose_with_hydra(command, [override_text(override) for override in overrides], config_dirs)
    for key, known in {"hydra/sweeper": ["basic"], "hydra/launcher": ["local", "basic"]}.items():
        if (chosen := hydra_config.hydra.runtime.choices[key]) not in known:
            raise Refusal(f"{key}={chosen}: plugins of Hydra do not work here, as -m starts all runs by itself")
    return hydra_config


def _read_concurrency(hydra_config: DictConfig) -> int | Literal["auto"]:
    value = OmegaConf.select(hydra_config, "hydra.launcher.n_jobs", default=1)
    try:
        return convert(value, Count | Literal["auto"])
    except Refusal as expected:
        raise Refusal(f"hydra.launcher.n_jobs={value}: expected {expected}") from None


def _yaml_sweep_overrides(hydra_config: DictConfig) -> list[Override]:
    """The words that an experiment's yaml adds under hydra.sweeper.params; they may do what a yaml may."""
    arguments = [f"{key}={value}" for key, value in (hydra_config.hydra.sweeper.params or {}).items()]
    # What is trusted and who starts processes decides which code runs: not for a file that others may have written.
    for argument in arguments:
        if re.match(r"[+~]*(trust|hydra)\b", argument):
            raise Refusal(f"hydra.sweeper.params: only the command line can set {argument}, but a yaml file does")
    overrides, problems = parse_overrides(arguments, sweeps=True)
    if problems:
        raise Refusal(join_problems(problems))
    return overrides


def _list_axes(overrides: list[Override], config_dirs: list[Path]) -> Axes:
    """What each word may be. Refusal for folders: all runs share one."""
    if (
        folder_keys := {override.key_or_group for override in overrides if override.is_sweep_override()}
        & _RUN_FOLDER_KEYS
    ):
        raise Refusal(f"{min(folder_keys)}: all runs share one folder, and each has a folder in it; give one value")
    return {override.get_key_element(): _list_words(override, config_dirs) for override in overrides}


def _list_words(override: Override, config_dirs: list[Path]) -> list[str]:
    """What one word may be. Refusal where it can be nothing."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [override_text(override)]
    options: list[Any] = []
    try:
        options = (
            value.filter(list_options(key, config_dirs))
            if isinstance(value, Glob)
            else [*override.sweep_string_iterator()]
        )
        why = f"no option of {key} matches"
    except HydraException:
        why = "these values cannot be listed; write a,b,c or range(1,4). Optuna searches a range (docs/sweeps.md)"
    if not options:
        raise Refusal(f"{override_text(override)}: {why}")
    return [f"{key}={each}" for each in options]


def _make_trial(number: int, choices: Sequence[str], axes: Axes, common: Sequence[str]) -> Trial:
    """The run of these words, one an axis; common: what they begin with."""
    overrides = {key: word for (key, words), word in zip(axes.items(), choices, strict=True) if len(words) > 1}
    # A folder is named by what differs; where nothing does, by all words but those that say where it is.
    distinguishing = list(overrides.values()) or [word for word in choices if not word.startswith("run.")]
    # Without what a path or a shell would read as something else.
    folder_name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(map(shorten_floats, distinguishing)))
    # for the table of results: the value alone, without the key
    values = {key.lstrip("+"): word[len(key) + 1 :] for key, word in overrides.items()}
    return Trial(number, f"{number}_{folder_name}"[:200].rstrip("_"), (*common, *choices), values)


def shorten_floats(text: str) -> str:
    """A text whose long fractions have four digits: range(0.1,0.5,0.1) makes some with seventeen."""
    long = r"\b(?=[\d.e+-]{9})\d+\.\d+(e[+-]?\d+)?"
    return re.sub(long, lambda each: f"{float(each[0]):.4g}", text)


def _compose_all(commands: Sequence[Sequence[str]]) -> DictConfig:
    """The configuration of the first of these runs. Refusal with everything that is wrong with any of them."""
    # As each run will compose itself, but in this process: what is wrong costs no start.
    configs, problems = [], []
    for words in commands:
        try:
            configs.append(compose(words))
        except Refusal as refusal:
            problems += str(refusal).splitlines()
    if problems:
        raise Refusal(join_problems([*dict.fromkeys(problems)]))
    if is_doctor_job(configs[0]):
        raise Refusal("-m trains several runs, and job=doctor examines the machines once: leave out -m")
    if opens_trained_run(configs[0]):
        raise Refusal("-m trains several runs in one folder; a job that opens a run takes one run.dir: leave out -m")
    return configs[0]


def run_arguments(trial: Trial, folder: Path) -> list[str]:
    """The command line of one run, with its own folder."""
    # The folder of all runs was decided above; each has its own in it.
    arguments = [word for word in trial.words if not re.match(r"\+*run\.(dir|name)=", word)]
    return [*arguments, f"run.dir={quote_value(str(folder / trial.name))}"]
