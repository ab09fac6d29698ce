"""From the words of the command line to one configuration, in Hydra's grammar.

Nothing here imports torch, so that a typo is answered at once. Hydra composes, but does not run the program: its own
runner would make a folder and a log file in every process.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainer.configuration.command_line import Words, line, parse, read
from trainer.configuration.interpolation import as_written, flat, resolved
from trainer.configuration.resource_paths import root
from trainer.configuration.schema import BESIDE, GROUPS, examine
from trainer.configuration.suggestions import assort, dashed, misnamed, mistyped, unread
from trainer.configuration.trained_run_config import of_run, opens_a_run
from trainer.messages import Refusal, did_you_mean, first_line, join_problems

_MOST = 10_000  # values of a file in which every reference has been replaced by what it refers to


def refuse_alias_bombs(folders: Iterable[Path]) -> None:
    """Refuse a lab's yaml file whose references multiply: Hydra follows each of them, for minutes and gigabytes."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        text = path.read_bytes()
        if b"&" not in text or b"*" not in text:
            continue
        try:
            root = yaml.compose(text, yaml.SafeLoader)  # a graph, in which what is referred to stands once
        except (yaml.YAMLError, ValueError):
            continue  # Hydra says what is wrong, if it is asked for this file
        if root is not None and (values := _values(root, {})) > _MOST:
            many = "without end" if math.isinf(values) else f"{values:,.0f} values"
            raise Refusal(f"{path}: its references (*name) make {many} of it; at most {_MOST:,} are read")


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node has, each reference followed; infinity where it refers to itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_values(each, known) for each in inner if isinstance(each, yaml.Node))
    return known[id(node)]


def compose(argv: Sequence[str]) -> DictConfig:
    """The configuration that a command line asks for, checked as far as it can be without importing torch.

    Refusal lists everything that is wrong with it. For --help, --cfg and their like the answer is printed and the
    process ends (SystemExit).
    """
    # What it says, word by word, before anything is composed.
    words = read(argv)
    if {"--shell-completion", "--hydra-help", "--version"} & {*words.flags}:  # no word could change the answer
        _answer(words, words.overrides)
    overrides, problems = parse(words.overrides)

    # Hydra composes what the groups' words choose. That tells which keys there are, and of which type.
    refuse_alias_bombs(words.folders)  # before it reads them
    with composing(words.folders) as places:
        chosen, changes = assort(overrides, places, problems)
        cfg = load(words, chosen, places)
    with open_dict(cfg):
        options = cfg.pop("hydra").runtime.choices
        _refuse_hidden(options, places)
        if opens_a_run(cfg):
            of_run(cfg, chosen, changes)
        _complete(cfg)
    values, unresolved = resolved(cfg)
    before = flat(values)
    if before["trust"]:
        problems.append("trust: only the command line can name trusted packages, but a yaml file does")
    problems += [dashed(flag, before) for flag in words.strange]

    # Words that change a key follow, where the key exists: composing a second time would double the time of a start.
    for change in changes:
        problems += (wrong := misnamed(change, before, places))
        if not wrong:
            _apply(change, cfg)

    # What came of it. A value that did not resolve says nothing about types.
    lines, later = _judged(cfg, before | dict.fromkeys(unresolved))
    if words.flags and not problems and not lines:
        _answer(words, [*chosen, *map(_for_hydra, changes)])
    later = {path: f"{said}{_behind(path, options, places)}" for path, said in later.items()}
    if problems := [*problems, *lines.values(), *later.values()]:
        raise Refusal(join_problems(problems))
    return cfg


def _judged(cfg: DictConfig, before: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Lines by path: what is wrong with the configuration as it is written; then what is wrong with its values only."""
    values, unresolved = resolved(cfg)
    found, written = flat(values) | dict.fromkeys(unresolved), as_written(cfg)
    lines = {group: f"{group}: choose one, {group}=NAME" for group in GROUPS if not isinstance(values.get(group), dict)}
    lines |= unread(found, written, before) | mistyped(found, before, written)

    # Each mistake once: what is known to be wrong is not read any more.
    wrong = unresolved | lines
    examine(values, written, wrong)
    return lines, {path: said for path, said in wrong.items() if path not in lines}


@contextmanager
def composing(labs: tuple[Path, ...]) -> Iterator[list[Path]]:
    """Hydra's composer over our conf/; gives the places where groups are looked up, the framework's own first."""
    own = root() / "conf"
    with hydra.initialize_config_dir(config_dir=str(own), version_base="1.3", job_name="trainer"):
        yield [own, *(lab for lab in labs if lab != own)]


def load(words: Words, chosen: Sequence[str], places: list[Path]) -> DictConfig:
    """What Hydra composes of these words, its own part included, inside `composing`. Refusal in one line."""
    try:
        return hydra.compose(words.config_name, [*chosen, *_searchpath(places[1:])], return_hydra_config=True)
    except Exception as error:  # Hydra answers what is wrong in a yaml with ten types of exception, and with asserts
        raise Refusal(_brief(error)) from error


def _searchpath(labs: Sequence[Path]) -> list[str]:
    """The word that lets Hydra look into these folders too."""
    entries = ",".join(quoted(f"file://{lab}") for lab in labs)
    return [f"hydra.searchpath=[{entries}]"] if entries else []


def quoted(word: str) -> str:
    """A text as a value of Hydra's grammar."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _brief(error: BaseException) -> str:
    # an assert says nothing; what it followed from may
    while not str(error).strip() and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.YAMLError):  # several lines, with the file and the place in it
        return f"this is not valid YAML: {' '.join(str(error).split())}"
    missing, there_are = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    return first_line(error) + (did_you_mean(missing.split("/")[-1], there_are) if missing and there_are else "")


def _behind(path: str, options: Mapping[str, str], places: list[Path]) -> str:
    """What stands behind a key in its group's yaml where that leaves the value open (???); empty elsewhere."""
    group, _, key = path.partition(".")
    for file in (place / group / f"{options.get(group)}.yaml" for place in places):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if found := re.search(rf"^{re.escape(key)}: *\?\?\? +# *(.+)$", text, re.MULTILINE):
            return f": {found[1]}"
    return ""


def _refuse_hidden(options: Mapping[str, str], places: list[Path]) -> None:
    """Hydra takes the first file of a name: say so where a lab has one that would silently not be read."""
    for group, option in options.items():
        for place in places[1:]:
            file = f"{group}/{option}.yaml"
            if (place / file).is_file() and any((other / file).is_file() for other in places[: places.index(place)]):
                raise Refusal(f"{place / file}: another {group} is called {option} already; give this one another name")


def _complete(cfg: DictConfig) -> None:
    """Give groups the framework's own keys that stand beside their target's, where an option's yaml names none."""
    for group, own in BESIDE.items():
        for key in own if group in cfg and isinstance(cfg[group], DictConfig) else ():
            if key not in cfg[group]:
                cfg[group][key] = own[key]


def _for_hydra(change: Override) -> str:
    """A word that changes a key, for Hydra itself, which knows only what stands in a yaml."""
    group, _, key = str(change.key_or_group).partition(".")
    beside = key in BESIDE.get(group, ()) and not change.is_delete()
    return f"++{line(change).lstrip('+')}" if beside else line(change)


def _apply(change: Override, cfg: DictConfig) -> None:
    """Change a key as Hydra would. Refusal where the place does not take the value."""
    key, value = change.key_or_group, change.value()
    try:
        if change.is_delete():
            above, _, last = key.rpartition(".")
            with open_dict(cfg):
                del (OmegaConf.select(cfg, above) if above else cfg)[last]
        else:
            # with a + a key may be new
            OmegaConf.update(cfg, key, value, merge=True, force_add=change.is_add() or change.is_force_add())
    except OmegaConfBaseException as error:
        raise Refusal(f"{line(change)}: {first_line(error)}") from error


def _answer(words: Words, overrides: Sequence[str]) -> NoReturn:
    """Let Hydra answer --help, --cfg, --info and the like, and end. Of several processes the first one answers."""
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    if "--version" in words.flags:
        from trainer import __version__

        print(f"trainer {__version__}")
        raise SystemExit(0)
    if "COMP_LINE" in os.environ:  # shell completion; Hydra knows `program words`, not `python -m program words`
        os.environ["COMP_LINE"] = re.sub(r"^.*?-m\s+trainer\b", "trainer", os.environ["COMP_LINE"])
    # --help looks into --config-dir only, of which Hydra takes one
    labs = [part for lab in words.folders[:1] for part in ("--config-dir", str(lab))]
    sys.argv = [sys.argv[0], *words.flags, *labs, *overrides, *_searchpath(words.folders[1:])]
    hydra.main(config_path=str(root() / "conf"), config_name=words.config_name, version_base="1.3")(_never)()
    raise SystemExit(0)


def _never(_: DictConfig) -> None:
    """What Hydra would run; it is only ever asked for answers."""
