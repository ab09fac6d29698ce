"""The command line taken apart: flags as Hydra writes them, folders of labs, and words that change a key."""

from __future__ import annotations

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

from trainer.refusal import Refusal, nearest


@dataclass(frozen=True)
class Words:
    """A command line."""

    overrides: tuple[str, ...]
    folders: tuple[Path, ...]  # of yaml files; what lies beside them may be called (names.py)
    config_name: str
    flags: tuple[str, ...]  # what Hydra must be given when it is to answer (--help, --cfg, …); empty: a run
    composes: bool = True  # does the answer depend on the overrides?
    multirun: bool = False  # several values of a word ask for several runs
    strange: tuple[str, ...] = ()  # --lr=3, --epochs 3: keys in the dress of flags


def read(argv: Sequence[str]) -> Words:
    """Take a command line apart. Refusal for a flag that is unknown, or that this program does not take."""
    # Flags may stand between words, as in Hydra; what is unknown may be a key in the dress of one.
    parser, argv = _parser(), list(argv)
    found, unknown = parser.parse_known_intermixed_args(argv)
    strange = tuple(_with_value(flag, argv, found.overrides, parser) for flag in unknown)

    if found.multirun and (found.cfg or found.info):
        raise Refusal("--cfg and --info show one run: give each key one value, and leave out -m")

    # What Hydra answers itself is handed to it as it would have been written.
    flags = [flag for flag in ("help", "hydra_help", "version", "shell_completion", "resolve") if getattr(found, flag)]
    spelled = tuple("--" + flag.replace("_", "-") for flag in flags)
    for flag, value in (("--cfg", found.cfg), ("--package", found.package), ("--info", found.info)):
        spelled += (flag, value) if value else ()

    # hydra.searchpath=[lab/conf] is Hydra's other way to say --config-dir.
    searched = [word for word in found.overrides if word.startswith("hydra.searchpath=")]
    folders = [_folder(name) for name in (*found.config_dir, *_entries(searched))]
    return Words(
        overrides=tuple(word for word in found.overrides if word not in searched),
        folders=tuple(dict.fromkeys(folders)),
        config_name=found.config_name,
        flags=spelled,
        composes=not (found.shell_completion or found.hydra_help or found.version),
        multirun=found.multirun and not spelled,
        strange=strange,
    )


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; --help shows what there is")


def _with_value(flag: str, argv: list[str], overrides: list[str], parser: ArgumentParser) -> str:
    """A flag that does not exist, as KEY=VALUE; takes its value out of the overrides. Refusal where a flag is near."""
    flags = re.findall(r"--[\w-]+", parser.format_usage())
    if get_close_matches(flag, flags, cutoff=0.75) or not flag.startswith("--"):
        raise Refusal(f"{flag}: there is no such flag{nearest(flag, flags)}; --help shows what there is")
    # --epochs 3: the value is the next word, unless it is one of its own.
    key, _, value = flag.removeprefix("--").partition("=")
    after = argv[argv.index(flag) + 1 : argv.index(flag) + 2]
    if "=" not in flag and after and after[0] in overrides and "=" not in after[0]:
        overrides.remove(value := after[0])
    return f"{key.replace('-', '_')}={value}"


def _parser() -> ArgumentParser:
    """Hydra's flags that mean something here, with errors in our words and any number of --config-dir."""
    parser = _Parser(prog="trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    # The long name first: the usage shows that one, and mistyped flags are compared with it.
    for long, short in (("--help", "-h"), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
        parser.add_argument(long, short, action="store_true")
    for long in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(long, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=infos)
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    return parser


def _folder(name: str) -> Path:
    folder = Path(name.removeprefix("file://")).expanduser().resolve()
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
        raise Refusal(f"--config-dir {name}: there is no folder {folder}{nearest(folder.name, beside)}")
    return folder


def _entries(searched: list[str]) -> list[str]:
    """The folders that words for hydra.searchpath name."""
    overrides, problems = parse(searched)
    if problems:
        raise Refusal(problems[0])
    values = [each.value() for each in overrides]
    entries = [str(entry) for value in values for entry in (value if isinstance(value, list) else [value])]
    for entry in entries:
        if "://" in entry and not entry.startswith("file://"):
            raise Refusal(f"hydra.searchpath: {entry} would import Python to look for yaml; give a folder")
    return entries


def parse(words: Sequence[str], sweeps: bool = False) -> tuple[list[Override], list[str]]:
    """The words in Hydra's grammar, and a line for each that cannot be read. `sweeps`: may there be several values?"""
    parser = OverridesParser.create()
    overrides, problems = [], []
    for word in words:
        try:
            overrides.append(_parsed(parser, word, sweeps))
        except Refusal as refusal:
            problems.append(str(refusal))
    return overrides, problems


def _parsed(parser: OverridesParser, word: str, sweeps: bool) -> Override:
    brief = word if len(word) <= 60 else word[:57] + "..."
    try:
        override = parser.parse_override(word)
    except HydraException:
        hint = "write KEY=VALUE" if "=" not in word else "quote values with spaces or signs: \"KEY='a b'\""
        raise Refusal(f"{brief}: this cannot be read; {hint}") from None
    if not override.key_or_group or not word.lstrip("+~").split("=")[0].strip():
        raise Refusal(f"{brief}: there is no key before the =")
    if override.is_sweep_override() and not sweeps:
        raise Refusal(f"{brief}: several values mean several runs: add -m; a list is written [a,b]")
    return override
