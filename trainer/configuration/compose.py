"""From the words of the command line to one configuration, in Hydra's grammar; what cannot work is refused in words.

Nothing here imports torch, so that a typo is answered at once. Hydra composes, but does not run the program: its own
runner would make a folder and a log file in every process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, open_dict

from trainer.configuration.bundle import root
from trainer.configuration.choices import assort, dashed, line, misnamed, mistyped, paths, unread
from trainer.configuration.lab import LabSource
from trainer.configuration.resolved import as_written
from trainer.configuration.settings import GROUPS, examine
from trainer.configuration.words import Words, parse, read, take_searchpath
from trainer.refusal import Refusal, nearest

LINES = 10  # of problems that are shown at once


def compose(argv: Sequence[str]) -> DictConfig:
    """The configuration that a command line asks for, checked as far as it can be without importing torch.

    Refusal lists everything that is wrong with it. For --help, --cfg and their like the answer is printed and the
    process ends (SystemExit).
    """
    words = read(argv)
    if not words.composes:
        _answer(words, words.overrides)
    overrides, problems = parse(words.overrides)
    words, overrides = take_searchpath(words, overrides)
    with composing(words.folders) as places:
        cfg, accepted = _composed(words, overrides, places, problems)
    if words.flags and not problems:
        _answer(words, accepted)
    problems += [line for line in examine(cfg)[1] if line not in problems]
    if problems:
        more = [f"… and {len(problems) - LINES} more"] if len(problems) > LINES else []
        raise Refusal("\n".join(problems[:LINES] + more))
    return cfg


def folders(argv: Sequence[str]) -> tuple[Path, ...]:
    """The folders of yaml files that a command line adds; what lies beside them may be called (names.py)."""
    words = read(argv)
    return take_searchpath(words, parse(words.overrides)[0])[0].folders


@contextmanager
def composing(labs: tuple[Path, ...]) -> Iterator[list[Path]]:
    """Hydra's composer over our conf/; gives the places where groups are looked up, the framework's own first."""
    own = root() / "conf"
    Plugins.instance().register(LabSource)
    with hydra.initialize_config_dir(config_dir=str(own), version_base="1.3", job_name="trainer"):
        yield [own, *(lab for lab in labs if lab != own)]


def load(words: Words, changes: Sequence[str], places: list[Path]) -> DictConfig:
    """What Hydra composes of these words, its own part included, inside `composing`. Refusal in one line."""
    labs = ",".join(quoted(f"{LabSource.scheme()}://{place}") for place in places[1:])
    try:
        return hydra.compose(words.config_name, [*changes, f"hydra.searchpath=[{labs}]"], return_hydra_config=True)
    except Refusal:
        raise
    except Exception as error:  # Hydra answers what is wrong in a yaml with ten types of exception, and with asserts
        raise Refusal(_brief(error)) from error


def quoted(word: str) -> str:
    """A text as a value of Hydra's grammar."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _brief(error: BaseException) -> str:
    while not str(error).strip() and error.__cause__ is not None:
        error = error.__cause__
    sentence = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    missing, options = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    return sentence + (nearest(missing.split("/")[-1], options) if missing and options else "")


def _composed(
    words: Words, overrides: list[Override], places: list[Path], problems: list[str]
) -> tuple[DictConfig, list[str]]:
    """The configuration without Hydra's own part, and the words that made it; appends what is wrong to the problems."""
    chosen, changes = assort(overrides, places, problems)
    base = load(words, chosen, places)
    known = [path for path in paths(as_written(base)) if not path.startswith("hydra.")]
    problems += [dashed(flag, known) for flag in words.strange]
    wrong = [misnamed(each, base, known) for each in changes]
    problems += [one for each in wrong for one in each]
    accepted = [line(each) for each, found in zip(changes, wrong, strict=True) if not found]
    cfg = load(words, chosen + accepted, places) if accepted else base
    with open_dict(cfg):
        own = cfg.pop("hydra")
    _refuse_hidden(own, places)
    problems += _astray(own, base, cfg) + unread(cfg, known)
    problems += mistyped(cfg, base)
    return cfg, chosen + accepted


def _refuse_hidden(own: DictConfig, places: list[Path]) -> None:
    """Hydra takes the first file of a name: say so where a lab has one that would silently not be read."""
    for group, option in own.runtime.choices.items():
        for place in places[1:]:
            file = f"{group}/{option}.yaml"
            if (place / file).is_file() and any((other / file).is_file() for other in places[: places.index(place)]):
                raise Refusal(f"{place / file}: another {group} is called {option} already; give this one another name")


def _astray(own: DictConfig, base: DictConfig, cfg: DictConfig) -> list[str]:
    """What a yaml must not set, and groups that were taken away."""
    problems, found = [], as_written(cfg)
    loggers = set(own.hydra_logging or {}) | set(own.job_logging or {})
    if own.callbacks or loggers - {"version", "root", "disable_existing_loggers"}:
        problems.append("hydra: a yaml file sets Hydra's callbacks or logging, which have no effect here; remove them")
    if as_written(base).get("trust"):
        problems.append("trust: only the command line can name trusted packages, but a yaml file does")
    problems += [f"{group}: choose one, {group}=NAME" for group in GROUPS if not isinstance(found.get(group), dict)]
    return problems


def _answer(words: Words, overrides: Sequence[str]) -> NoReturn:
    """Let Hydra answer --help, --cfg, --info and the like, and end. Of several processes the first one answers."""
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    if "--version" in words.flags:
        print(f"trainer {version('trainer')}")
        raise SystemExit(0)
    if "COMP_LINE" in os.environ:  # shell completion; Hydra knows `program words`, not `python -m program words`
        os.environ["COMP_LINE"] = re.sub(r"^.*?-m\s+trainer\b", "trainer", os.environ["COMP_LINE"])
    labs = [part for lab in words.folders[:1] for part in ("--config-dir", str(lab))]
    others = ",".join(quoted(f"{LabSource.scheme()}://{lab}") for lab in words.folders[1:])
    search = [f"hydra.searchpath=[{others}]"] if others else []
    sys.argv = [sys.argv[0], *words.flags, *labs, *overrides, *search]
    hydra.main(config_path=str(root() / "conf"), config_name=words.config_name, version_base="1.3")(_never)()
    raise SystemExit(0)


def _never(_: DictConfig) -> None:
    """What Hydra would run; it is only ever asked for answers."""
