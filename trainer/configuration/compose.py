"""From the words of the command line to one configuration, in Hydra's grammar.

Nothing here imports torch, so that a typo is answered at once. Hydra composes, but does not run the program: its own
runner would make a folder and a log file in every process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainer.configuration.command_line import CommandLine, override_text, parse_command_line, parse_overrides
from trainer.configuration.interpolation import flatten, flatten_unresolved, refuse_alias_bombs, resolve_interpolations
from trainer.configuration.job_kinds import opens_trained_run
from trainer.configuration.key_checks import (
    check_override_key,
    find_type_errors,
    find_unread_keys,
    split_overrides,
    suggest_for_flag,
)
from trainer.configuration.removed_words import in_todays_words, removed_value, removed_word
from trainer.configuration.resource_paths import resource_root
from trainer.configuration.schema import GROUPS, RESERVED_KEYS, spell_out_compile, validate_settings
from trainer.launch.safe_files import resolve_links
from trainer.launch.typed_values import DamagedFile, read_json, read_yaml
from trainer.messages import Refusal, did_you_mean, expand_home, first_line, join_problems
from trainer.records.start_files import ConfigFields, EnvironmentFields


def compose(argv: Sequence[str]) -> DictConfig:
    """The configuration that a command line asks for, checked as far as it can be without importing torch.

    Refusal lists everything that is wrong with it. For --help, --cfg and their like the answer is printed and the
    process ends (SystemExit).
    """
    # What it says, word by word, before anything is composed.
    command = parse_command_line(argv)
    if {"--shell-completion", "--hydra-help", "--version"} & {*command.flags}:  # no word could change the answer
        _answer_with_hydra(command, command.overrides)
    overrides, problems = parse_overrides(command.overrides)

    # Hydra composes what the groups' words choose. That tells which keys there are, and of which type.
    refuse_alias_bombs(command.folders)  # before it reads them
    with open_config_dirs(command.folders) as config_dirs:
        chosen, changes = split_overrides(overrides, config_dirs, problems)
        cfg = compose_with_hydra(command, chosen, config_dirs)
    with open_dict(cfg):
        # Hydra's own part has done its work; the rest of the program never sees it
        choices = cfg.pop("hydra").runtime.choices
        _refuse_shadowed_options(choices, config_dirs)
        if opens_trained_run(cfg):
            apply_trained_run(cfg, chosen, changes)
        _add_reserved_keys(cfg)
        if isinstance(short := cfg["compile"], bool):  # of a yaml file: words may change single keys of it
            cfg["compile"] = spell_out_compile(short)
    values, unresolved = resolve_interpolations(cfg)
    composed_values = flatten(values)
    if composed_values["trust"]:
        problems.append("trust: only the command line can name trusted packages, but a yaml file does")
    problems += [suggest_for_flag(flag, composed_values) for flag in command.flag_like_keys]

    # Words that change a key follow, where the key exists: composing a second time would double the time of a start.
    for override in changes:
        problems += (key_problems := check_override_key(override, composed_values, config_dirs))
        if not key_problems:
            _apply_override(override, cfg)

    # What came of it. A value that did not resolve says nothing about types.
    config_problems, value_problems = _find_errors(cfg, composed_values | dict.fromkeys(unresolved))
    if command.flags and not problems and not config_problems:
        _answer_with_hydra(command, [*chosen, *map(_as_hydra_override, changes)])
    value_problems = {
        path: f"{problem}{_comment_of_open_value(path, choices, config_dirs)}"
        for path, problem in value_problems.items()
    }
    if problems := [*problems, *config_problems.values(), *value_problems.values()]:
        raise Refusal(join_problems(problems))
    return cfg


def _find_errors(cfg: DictConfig, composed_values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Lines by path: what is wrong with the configuration as it is written; then what is wrong with its values only."""
    values, unresolved = resolve_interpolations(cfg)
    values_by_path, written = flatten(values) | dict.fromkeys(unresolved), flatten_unresolved(cfg)
    problems = {
        group: f"{group}: choose one, {group}=NAME" for group in GROUPS if not isinstance(values.get(group), dict)
    }
    problems |= find_unread_keys(values_by_path, written, composed_values) | find_type_errors(
        values_by_path, composed_values, written
    )

    # Each mistake once: what is known to be wrong is not read any more.
    wrong = unresolved | problems
    validate_settings(values, written, wrong)
    wrong = {path: removed_value(path, values_by_path.get(path)) or problem for path, problem in wrong.items()}
    values_only = {path: problem for path, problem in wrong.items() if path not in problems}
    return {path: wrong[path] for path in problems}, values_only


@contextmanager
def open_config_dirs(lab_dirs: tuple[Path, ...]) -> Iterator[list[Path]]:
    """Hydra's composer over our conf/; gives the places where groups are looked up, the framework's own first."""
    own_dir = resource_root() / "conf"
    with hydra.initialize_config_dir(config_dir=str(own_dir), version_base="1.3", job_name="trainer"):
        yield [own_dir, *(lab_dir for lab_dir in lab_dirs if lab_dir != own_dir)]


def compose_with_hydra(command: CommandLine, chosen: Sequence[str], config_dirs: list[Path]) -> DictConfig:
    """What Hydra composes of these words, its own part included, inside `open_config_dirs`. Refusal in one line."""
    try:
        return hydra.compose(command.config_name, [*chosen, *_searchpath(config_dirs[1:])], return_hydra_config=True)
    except Exception as error:  # Hydra answers what is wrong in a yaml with ten types of exception, and with asserts
        raise Refusal(_missing_option_message(error, chosen, config_dirs) or _hydra_error_message(error)) from error


def _searchpath(labs: Sequence[Path]) -> list[str]:
    """The word that lets Hydra look into these folders too."""
    # paths may hold commas and spaces, so each is quoted in Hydra's grammar
    entries = ",".join(quote_value(f"file://{lab}") for lab in labs)
    return [f"hydra.searchpath=[{entries}]"] if entries else []


def quote_value(text: str) -> str:
    """A text as a value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _missing_option_message(error: BaseException, chosen: Sequence[str], config_dirs: list[Path]) -> str:
    """The yaml file whose defaults ask for an option that does not exist, and the nearest; "" for another error."""
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    name, known = rf"['\"]?{re.escape(option)}['\"]?", getattr(error, "options", None) or []
    asks = re.compile(rf"^\s*-\s+(override\s+)?/?({group}(@\S+)?:\s*)?{name}\s*(#.*)?$", re.MULTILINE)
    gone = removed_word(group, option)
    words = {word.rpartition("=")[2] for word in chosen}  # of several files that ask, one that was chosen
    files = (file for place in config_dirs for file in place.rglob("*.yaml") if group)
    for file in sorted(files, key=lambda file: (file.stem not in words, file)):
        if asks.search(file.read_text(encoding="utf-8", errors="replace")):
            nearest = did_you_mean(option, known) or f"; there are {', '.join(known[:30])}"
            if gone:
                return f"{file}: {gone}"
            return f"{file}: its defaults ask for {group}={option}, and there is no such option{nearest}"
    return gone


def _hydra_error_message(error: BaseException) -> str:
    # an assert says nothing; what it followed from may
    while not str(error).strip() and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.YAMLError):  # several lines, with the file and the place in it
        return f"this is not valid YAML: {' '.join(str(error).split())}"
    missing_file, options = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    return first_line(error) + (did_you_mean(missing_file.split("/")[-1], options) if missing_file and options else "")


def _comment_of_open_value(path: str, choices: Mapping[str, str], config_dirs: list[Path]) -> str:
    """What stands behind a key in its group's yaml where that leaves the value open (???); empty elsewhere."""
    group, _, key = path.partition(".")
    # the comment behind ??? says what is to be given there
    for file in (config_dir / group / f"{choices.get(group)}.yaml" for config_dir in config_dirs):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if match := re.search(rf"^{re.escape(key)}: *\?\?\? +# *(.+)$", text, re.MULTILINE):
            return f": {match[1]}"
    return ""


def _refuse_shadowed_options(choices: Mapping[str, str], config_dirs: list[Path]) -> None:
    """Hydra takes the first file of a name: say so where a lab has one that would silently not be read."""
    for group, option in choices.items():
        for config_dir in config_dirs[1:]:
            file = f"{group}/{option}.yaml"
            if (config_dir / file).is_file() and any(
                (other / file).is_file() for other in config_dirs[: config_dirs.index(config_dir)]
            ):
                raise Refusal(
                    f"{config_dir / file}: another {group} is called {option} already; give this one another name"
                )


def _add_reserved_keys(cfg: DictConfig) -> None:
    """Give groups the framework's own keys that stand beside their target's, where an option's yaml names none."""
    for group, defaults in RESERVED_KEYS.items():
        for key in defaults if group in cfg and isinstance(cfg[group], DictConfig) else ():
            if key not in cfg[group]:
                cfg[group][key] = defaults[key]


def _as_hydra_override(change: Override) -> str:
    """A word that changes a key, for Hydra itself, which knows only what stands in a yaml."""
    group, _, key = str(change.key_or_group).partition(".")
    beside = key in RESERVED_KEYS.get(group, ()) and not change.is_delete()
    return f"++{override_text(change).lstrip('+')}" if beside else override_text(change)


def _apply_override(change: Override, cfg: DictConfig) -> None:
    """Change a key as Hydra would. Refusal where the place does not take the value."""
    key, value = change.key_or_group, change.value()
    if key == "compile" and isinstance(value, bool):  # beside words that change other keys of the section, in any order
        key, value = "compile.mode", spell_out_compile(value)["mode"]
    try:
        if change.is_delete():
            # OmegaConf has no delete: the key is taken out of the section above it
            above, _, last = key.rpartition(".")
            with open_dict(cfg):
                del (OmegaConf.select(cfg, above) if above else cfg)[last]
        else:
            # with a + a key may be new
            OmegaConf.update(cfg, key, value, merge=True, force_add=change.is_add() or change.is_force_add())
    except OmegaConfBaseException as error:
        raise Refusal(f"{override_text(change)}: {first_line(error)}") from error


def _answer_with_hydra(command: CommandLine, overrides: Sequence[str]) -> NoReturn:
    """Let Hydra answer --help, --cfg, --info and the like, and end. Of several processes the first one answers."""
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    if "--version" in command.flags:
        from trainer import __version__

        # without Hydra, which would print its own version
        print(f"trainer {__version__}")
        raise SystemExit(0)
    if "COMP_LINE" in os.environ:  # shell completion; Hydra knows `program words`, not `python -m program words`
        os.environ["COMP_LINE"] = re.sub(r"^.*?-m\s+trainer\b", "trainer", os.environ["COMP_LINE"])
    # --help looks into --config-dir only, of which Hydra takes one
    labs = [part for lab in command.folders[:1] for part in ("--config-dir", str(lab))]
    sys.argv = [sys.argv[0], *command.flags, *labs, *overrides, *_searchpath(command.folders[1:])]
    hydra.main(config_path=str(resource_root() / "conf"), config_name=command.config_name, version_base="1.3")(
        _never_called
    )()
    raise SystemExit(0)


def _never_called(_: DictConfig) -> None:
    """What Hydra would run; it is only ever asked for answers."""


# ----------------------------------------------------------------------------------------- jobs that open a trained run

# What is never taken over: what is to be done, where, with whose code, and sinks, which are for what is trained.
_NOT_TAKEN_OVER = ("job", "run", "processes", "trust", "log")


def apply_trained_run(cfg: DictConfig, chosen: Sequence[str], changes: Sequence[Override]) -> None:
    """Put the run's own values into what was composed, in place, but for the groups that were chosen anew.

    chosen, changes: the words that choose options, and those that change keys. Refusal where there is no such run.
    """
    changed = {str(change.key_or_group): change.value() for change in changes}
    # strategy=fsdp → strategy: a group that the command line chooses anew
    groups = {word.split("=")[0].lstrip("+~") for word in chosen}
    job = str(cfg.job.get("_target_")).rpartition(".")[2].lower()
    folder = _trained_run_folder(cfg, changed, job)
    if "experiment" in groups:
        raise Refusal(f"job={job} has the configuration of {folder}; leave experiment out, and change keys one by one")

    # what the command line chooses anew need not mean anything any more
    trained, gone = in_todays_words(_read_trained_config(folder))
    lines = [line for path, line in gone.items() if path not in changed and path.split(".")[0] not in groups]
    if lines:
        raise Refusal(
            f"job={job}: {folder / 'config.yaml'} has words that are gone. A word that chooses anew opens the run"
            f" (strategy=single, compile.mode=null), or take the line out of that file:\n{join_problems(lines)}"
        )

    # a group's keys belong to what its option builds: of one that is chosen anew nothing of the run's is left
    for key, value in trained.items():
        if key in GROUPS or not isinstance(value, dict):
            if key in cfg and key not in groups:
                cfg[key] = value
        elif key in cfg:
            # a key of another version of the framework has no meaning here
            cfg[key].update({name: item for name, item in value.items() if name in cfg[key]})
    cfg.run.dir, cfg.log = str(folder), cfg.log if "log" in groups else {}


def _trained_run_folder(cfg: DictConfig, changed: dict[str, Any], job: str) -> Path:
    """The run's folder, as run.dir or run.name says it."""
    # only what was typed counts: the configuration has a run.name of its own perhaps, for training
    root, name, path = changed.get("run.root", cfg.run.root), changed.get("run.name"), changed.get("run.dir")
    if path is None and name is None:
        raise Refusal(f"job={job} opens a run that was trained: add run.dir=FOLDER, the folder of that run")
    folder = resolve_links(expand_home(str(path) if path is not None else f"{root}/{name}"))
    if not (folder / "config.yaml").is_file():
        problem = "holds no config.yaml: it is no run folder" if folder.is_dir() else "does not exist"
        raise Refusal(f"job={job}: {folder} {problem}")
    return folder


def _read_trained_config(folder: Path) -> dict[str, Any]:
    """What the run was configured with; what it resolved `auto` to is kept, whatever this machine would choose."""
    environment = folder / "environment.json"
    try:
        config = read_yaml(folder / "config.yaml", ConfigFields)
        # this machine might choose another type, and the weights would be computed with otherwise
        if config.get("precision") == "auto" and environment.is_file():
            config["precision"] = read_json(environment, EnvironmentFields)[0].get("precision", "auto")
    except DamagedFile as error:
        raise Refusal(f"the run cannot be opened, as one of its files is damaged: {error}") from error
    return {key: value for key, value in config.items() if key not in _NOT_TAKEN_OVER}
