"""What -m asks for: the words of each run, in Hydra's grammar of several values, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainer.configuration.command_line import CommandLine, override_text, parse_command_line, parse_overrides
from trainer.configuration.compose import compose, open_config_dirs, quote_value
from trainer.configuration.hydra_plugins import HYDRA_KEY, Search, compose_hydra_section, parse_search, read_hydra_key
from trainer.configuration.job_kinds import is_doctor_job, is_report_job, opens_trained_run
from trainer.configuration.key_checks import list_options
from trainer.configuration.key_types import Count
from trainer.messages import Refusal, join_problems

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_RUN_FOLDER_KEYS = {"run", "run.root", "run.name", "run.dir"}  # all runs share one folder


@dataclass(frozen=True)
class Trial:
    """One run of several: its number, the name of its folder, the words that make it, and what differs in them."""

    number: int
    name: str
    words: tuple[str, ...]
    values: dict[str, str]


@dataclass(frozen=True)
class Choice:
    """A word that is one of these; as a rule there is one only."""

    key: str
    words: tuple[str, ...]

    @property
    def written(self) -> str:
        """All of it as one word."""
        return self.words[0] if len(self.words) == 1 else f"{self.key}={','.join(self.values)}"

    @property
    def values(self) -> list[str]:
        """What may stand behind the key."""
        return [word.partition("=")[2] for word in self.words]

    def listed(self) -> tuple[str, ...]:
        """All that it may be."""
        return self.words

    end_points = listed

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.words)

    def word(self, chosen: str) -> str:
        """What Optuna has chosen, as a word."""
        return chosen


@dataclass(frozen=True)
class NumberRange:
    """A number between two, both included: `interval(1e-4,1e-1)`."""

    key: str
    low: float
    high: float
    whole: bool  # int(interval(1,8)): whole numbers
    log: bool  # tag(log,interval(1e-4,1e-1)): as many below 1e-3 as above 1e-2
    written: str  # the word as it was typed

    def listed(self) -> tuple[str, ...]:
        """Refusal: there is no end of them."""
        raise Refusal(
            f"{self.written}: these values cannot be listed; write a,b,c or range(1,4), or let Optuna choose:"
            " hydra/sweeper=optuna"
        )

    def end_points(self) -> tuple[str, ...]:
        """The words at both ends."""
        return self.word(self.low), self.word(self.high)

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def word(self, chosen: float) -> str:
        """What Optuna has chosen, as a word."""
        return f"{self.key}={chosen!r}"


Axis = Choice | NumberRange


@dataclass(frozen=True)
class SearchSpace:
    """All words of a sweep, each with what it may be."""

    common_arguments: tuple[str, ...]  # what a run's words begin with: folders of labs, the configuration's name
    axes: tuple[Axis, ...]

    @property
    def varying(self) -> list[Axis]:
        """The words that differ from run to run."""
        return [axis for axis in self.axes if len(axis.end_points()) > 1]

    def grid(self) -> tuple[Trial, ...]:
        """Every combination of values, the last word's changing fastest. Refusal where they cannot be counted."""
        # itertools: the last axis changes fastest
        combinations = product(*(axis.listed() for axis in self.axes))
        return tuple(self.trial(number, choices) for number, choices in enumerate(combinations))

    def covering_trials(self) -> Iterator[Trial]:
        """As few runs as have every value once, or both ends of what has no list."""
        values = [axis.end_points() for axis in self.axes]
        for index in range(max(map(len, values), default=1)):
            yield self.trial(index, [options[index % len(options)] for options in values])

    def trial(self, number: int, choices: Sequence[str]) -> Trial:
        """The run of these words, one an axis."""
        varying_keys = {axis.key for axis in self.varying}
        overrides = {axis.key: word for axis, word in zip(self.axes, choices, strict=True) if axis.key in varying_keys}
        # A folder is named by what differs; where nothing does, by all words but those that say where it is.
        distinguishing = list(overrides.values()) or [word for word in choices if not word.startswith("run.")]
        # Without what a path or a shell would read as something else.
        folder_name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(map(shorten_floats, distinguishing)))
        # for the table of results: the value alone, without the key
        values = {key.lstrip("+"): word[len(key) + 1 :] for key, word in overrides.items()}
        return Trial(number, f"{number}_{folder_name}"[:200].rstrip("_"), (*self.common_arguments, *choices), values)


def shorten_floats(text: str) -> str:
    """A text whose long fractions have four digits: what Optuna chooses has seventeen."""
    long = r"\b(?=[\d.e+-]{9})\d+\.\d+(e[+-]?\d+)?"
    return re.sub(long, lambda each: f"{float(each[0]):.4g}", text)


@dataclass(frozen=True)
class Multirun:
    """Several runs, where they go, and who starts them."""

    space: SearchSpace  # their words
    search: Search | None  # None: every combination of them is a run
    root: str  # run.root, run.name and run.dir, which the runs share
    name: str | None
    dir: str | None
    fresh: bool  # run.resume=fresh
    init_method: str  # where the processes meet
    plugin: str | None  # the launcher of Hydra that starts the runs; None: this very command
    concurrency: int | Literal["auto"]  # how many runs this command keeps going; auto: as many as there are GPUs for
    device: str
    processes: int | str | None  # of each run
    hydra_config: DictConfig  # Hydra's own part, for launchers that are its plugins


def parse_multirun(argv: Sequence[str]) -> Multirun:
    """Take the command line of several runs apart. Refusal that lists what is wrong with the words of any of them."""
    command = parse_command_line(argv)
    overrides, problems = parse_overrides(command.overrides, sweeps=True)
    if problems:
        raise Refusal(join_problems(problems))
    hydra_overrides = [override for override in overrides if HYDRA_KEY.match(override.key_or_group)]
    with open_config_dirs(command.folders) as config_dirs:
        # An experiment's yaml may list values, too. Of two words for one key the last holds, the command line's here.
        experiments = [
            override
            for override in overrides
            if override.key_or_group == "experiment" and not override.is_sweep_override()
        ]
        hydra_config = compose_hydra_section(command, experiments, hydra_overrides, config_dirs)
        by_key = {
            override.get_key_element(): override
            for override in [*_yaml_sweep_overrides(hydra_config), *overrides]
            if override not in hydra_overrides
        }
        space = _build_space(command, list(by_key.values()), config_dirs)
    search = parse_search(hydra_config)
    if search is None:
        space.grid()  # what cannot be listed is refused here
    launcher = hydra_config.hydra.runtime.choices["hydra/launcher"]
    plugin = None if launcher in ("local", "basic") else launcher

    # Every mistake of any run is told before the first one starts.
    cfg = _compose_all(space.covering_trials())
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
        1 if plugin else read_hydra_key(hydra_config, "hydra.launcher.n_jobs", Count | Literal["auto"], 1),
        cfg.device,
        cfg.processes,
        hydra_config,
    )


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


def _build_space(command: CommandLine, overrides: list[Override], config_dirs: list[Path]) -> SearchSpace:
    """What each word may be."""
    if (
        folder_keys := {override.key_or_group for override in overrides if override.is_sweep_override()}
        & _RUN_FOLDER_KEYS
    ):
        raise Refusal(f"{min(folder_keys)}: all runs share one folder, and each has a folder in it; give one value")
    # Each run's words are a command line of their own, folders of labs included.
    lab_flags = [part for lab in command.folders for part in ("--config-dir", str(lab))]
    config_name = [] if command.config_name == "config" else ["--config-name", command.config_name]
    return SearchSpace((*lab_flags, *config_name), tuple(_axis(override, config_dirs) for override in overrides))


def _axis(override: Override, config_dirs: list[Path]) -> Axis:
    """What one word may be. Refusal where it can be nothing."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return Choice(key, (override_text(override),))
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        log, whole = "log" in value.tags, isinstance(value.start, int) and isinstance(value.end, int)
        if not value.start < value.end or (log and value.start <= 0):
            raise Refusal(
                f"{override_text(override)}: the first number must be the smaller one{', above 0' if log else ''}"
            )
        return NumberRange(key, value.start, value.end, whole, log, override_text(override))
    options: list[Any] = []
    try:
        options = (
            value.filter(list_options(key, config_dirs))
            if isinstance(value, Glob)
            else [*override.sweep_string_iterator()]
        )
        why = f"no option of {key} matches"
    except HydraException:
        why = "these values cannot be listed; write a,b,c or range(1,4)"
    if not options:
        raise Refusal(f"{override_text(override)}: {why}")
    return Choice(key, tuple(f"{key}={each}" for each in options))


def _compose_all(trials: Iterable[Trial]) -> DictConfig:
    """The configuration of the first of these runs. Refusal with everything that is wrong with any of them."""
    # As each run will compose itself, but in this process: what is wrong costs no start.
    configs, problems = [], []
    for trial in trials:
        try:
            configs.append(compose(trial.words))
        except Refusal as refusal:
            problems += str(refusal).splitlines()
    if problems:
        raise Refusal(join_problems([*dict.fromkeys(problems)]))
    if is_doctor_job(configs[0]):
        raise Refusal("-m trains several runs, and job=doctor examines the machines once: leave out -m")
    if opens_trained_run(configs[0]) or is_report_job(configs[0]):
        raise Refusal("-m trains several runs in one folder; a job that opens a run takes one run.dir: leave out -m")
    return configs[0]


def run_arguments(trial: Trial, folder: Path) -> list[str]:
    """The command line of one run, with its own folder."""
    # The folder of all runs was decided above; each has its own in it.
    arguments = [word for word in trial.words if not re.match(r"\+*run\.(dir|name)=", word)]
    return [*arguments, f"run.dir={quote_value(str(folder / trial.name))}"]
