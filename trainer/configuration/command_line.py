"""The command line taken apart: flags as Hydra writes them, folders of labs, and words that change a key."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer.messages import Refusal, did_you_mean, expand_home

_MAX_VALUES = 2_000  # values in one word: half a second of Hydra's parser, whose time grows with their square


@dataclass(frozen=True)
class CommandLine:
    """A command line."""

    overrides: tuple[str, ...]
    folders: tuple[Path, ...]  # of yaml files; what lies beside them may be called (allowed_targets.py)
    config_name: str
    flags: tuple[str, ...]  # what Hydra must be given when it is to answer (--help, --cfg, …); empty: a run
    multirun: bool = False  # several values of a word ask for several runs
    flag_like_keys: tuple[str, ...] = ()  # --lr=3, --epochs 3: keys in the dress of flags


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart. Refusal for a flag that is unknown, or that this program does not take."""
    # Flags may stand between words, as in Hydra; what is unknown may be a key in the dress of one.
    parser, argv = _parser(), list(argv)
    options, unknown = parser.parse_known_intermixed_args(argv)
    flags = [text for text in unknown if text.startswith("-")]  # of --epochs 3 the 3 is no flag, but its value
    options.overrides += [text for text in unknown if text not in flags]
    strange = tuple(_flag_as_override(flag, argv, options.overrides, parser) for flag in flags)
    if options.multirun and (options.cfg or options.info):
        raise Refusal("--cfg and --info show one run: give each key one value, and leave out -m")

    # What Hydra answers itself is handed to it as it would have been written.
    valued = (("--cfg", options.cfg), ("--package", options.package), ("--info", options.info))
    flags = [*options.flags, *(part for flag, value in valued if value for part in (flag, value))]
    return CommandLine(
        overrides=tuple(options.overrides),
        folders=tuple(dict.fromkeys(map(_config_dir, options.config_dir))),
        config_name=options.config_name,
        flags=tuple(flags),
        multirun=options.multirun and not flags,
        flag_like_keys=strange,
    )


def code_arguments(argv: Sequence[str]) -> list[str]:
    """Those words of a command line that say whose code may be named: folders of labs, and trusted packages."""
    words = parse_command_line(argv)
    labs = [part for lab in words.folders for part in ("--config-dir", str(lab))]
    return [*labs, *(word for word in words.overrides if word.startswith("trust="))]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; --help shows what there is")


def _parser() -> ArgumentParser:
    """Hydra's flags that mean something here, with errors in our words and any number of --config-dir.

    Hydra's own parser is private, ends the process at a mistake, and takes flags that would do nothing.
    """
    parser = _Parser(prog="trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    # The long name first: the usage shows that one, and mistyped flags are compared with it.
    for names in (["--help", "-h"], ["--shell-completion", "-sc"], ["--hydra-help"], ["--version"], ["--resolve"]):
        parser.add_argument(*names, action="append_const", dest="flags", const=names[0], default=[])
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=infos)
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    return parser


def _flag_as_override(flag: str, argv: list[str], overrides: list[str], parser: ArgumentParser) -> str:
    """A flag that does not exist, as KEY=VALUE; takes its value out of the overrides. Refusal where a flag is near."""
    flags = re.findall(r"--[\w-]+", parser.format_usage())
    if get_close_matches(flag, flags, cutoff=0.75) or not flag.startswith("--"):
        raise Refusal(f"{flag}: there is no such flag{did_you_mean(flag, flags)}; --help shows what there is")
    # --epochs 3: the value is the next word, unless it is one of its own.
    key, _, value = flag.removeprefix("--").partition("=")
    following = argv[argv.index(flag) + 1 : argv.index(flag) + 2]
    if "=" not in flag and following and following[0] in overrides and "=" not in following[0]:
        overrides.remove(value := following[0])
    return f"{key.replace('-', '_')}={value}"


def _config_dir(name: str) -> Path:
    folder = expand_home(name).resolve()
    # Hydra would go on without it and miss an option later.
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
        raise Refusal(f"--config-dir {name}: there is no folder {folder}{did_you_mean(folder.name, beside)}")
    return folder


def parse_overrides(arguments: Sequence[str], sweeps: bool = False) -> tuple[list[Override], list[str]]:
    """The words in Hydra's grammar, and a line for each that cannot be read. `sweeps`: may there be several values?"""
    parser = OverridesParser.create()
    overrides, problems = [], []
    for argument in arguments:
        brief = argument if len(argument) <= 60 else argument[:57] + "..."
        if (commas := argument.count(",")) > _MAX_VALUES:
            problems.append(
                f"{brief}: a list of {commas + 1:,} values; a word has at most {_MAX_VALUES:,}, a yaml file more"
            )
            continue
        try:
            # shells leave data.root=~/pictures as it is, and Hydra's grammar has no such sign
            override = parser.parse_override(re.sub(r"^([^=]+=)(~[^,'\"]*)$", r"\1'\2'", argument))
        except HydraException:
            hint = "write KEY=VALUE" if "=" not in argument else "quote values with spaces or signs: \"KEY='a b'\""
            problems.append(f"{brief}: this cannot be read; {hint}")
            continue
        if not argument.lstrip("+~").split("=")[0].strip():
            problems.append(f"{brief}: there is no key before the =")
        elif override.is_sweep_override() and not sweeps:
            problems.append(f"{brief}: several values mean several runs: add -m; a list is written [a,b]")
        else:
            overrides.append(override)
    return overrides, problems


def override_text(override: Override) -> str:
    """The word as it was typed."""
    assert override.input_line is not None
    return override.input_line


def add_overrides(arguments: Sequence[str], *added: str) -> list[str]:
    """Arguments of the command line with more overrides, behind the last one: flags may not stand between overrides."""
    overrides = [at for at, argument in enumerate(arguments) if "=" in argument and not argument.startswith("-")]
    end = overrides[-1] + 1 if overrides else len(arguments)
    return [*arguments[:end], *added, *arguments[end:]]


def quote_path(path: Path) -> str:
    """A path as a value of Hydra's grammar."""
    # other characters have a meaning in that grammar, and need quotes
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", str(path))
    return str(path) if plain else json.dumps(str(path), ensure_ascii=False)
