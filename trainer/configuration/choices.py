"""What each word of the command line asks for: an option of a group, the value of a key, or nothing that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from trainer.configuration.resolved import as_written
from trainer.configuration.settings import GROUPS
from trainer.configuration.typos import nearest_paths, paths, unknown
from trainer.refusal import nearest

LISTED = ("job", *GROUPS, "experiment")  # in config.yaml's defaults: +experiment=x can only mean experiment=x
SINGLE = ("job", *(group for group in GROUPS if group != "log"))  # groups of which one option is chosen


def assort(
    overrides: list[Override], places: list[Path], problems: list[str]
) -> tuple[list[str], list[Override], list[Override]]:
    """Words that choose a group's option; words that change a key; words about Hydra itself."""
    chosen, changes, of_hydra = [], [], []
    for each in overrides:
        if re.match(r"hydra\b", each.key_or_group):
            of_hydra.append(each)
        elif _is_group(each.key_or_group, places) and not isinstance(each.value(), dict):
            wrong = None if each.is_delete() else _no_option(each, places)
            if wrong:
                problems.append(wrong)
            elif not (each.key_or_group == "experiment" and each.value() is None):
                chosen.append(line(each).lstrip("+") if each.key_or_group in LISTED else line(each))
        else:
            changes.append(each)
    return chosen, changes, of_hydra


def _is_group(name: str, places: list[Path]) -> bool:
    return bool(re.fullmatch(r"\w[\w/-]*", name)) and any((place / name).is_dir() for place in places)


def _no_option(override: Override, places: list[Path]) -> str | None:
    group, value = override.key_or_group, override.value()
    if value is None and group == "experiment":
        return None
    options = sorted({file.stem for place in places for file in (place / group).glob("*.yaml")})
    listed = ", ".join(options[:30]) or "none"
    if isinstance(value, list) and group in SINGLE:
        return f"{line(override)}: expected one of {listed}, not a list"
    for option in value if isinstance(value, list) else [value]:
        if not isinstance(option, str):
            return f"{line(override)}: expected one of {listed}"
        if not any((place / group / f"{option.removesuffix('.yaml')}.yaml").is_file() for place in places):
            return f"{group}={option}: there is no such option{nearest(option, options) or '.'} There are: {listed}"
    return None


def dashed(flag: str, known: list[str]) -> str:
    """What to write instead of a key that was written like a flag: --lr=3 means optimizer.lr=3."""
    key, _, value = flag.partition("=")
    right = [key] if key in known else nearest_paths(key, known)
    hint = f"; write {' or '.join(f'{path}={value}' for path in right)}" if right else "; --help shows what there is"
    return f"--{key}: keys are written as KEY=VALUE, without dashes{hint}"


def misnamed(override: Override, base: DictConfig, known: list[str]) -> list[str]:
    """What is wrong with the key of a word, given the paths of everything there is."""
    path = re.sub(r"\[['\"]?([^]'\"]*)['\"]?\]", r".\1", override.key_or_group)
    names = set(known)
    if override.is_force_add() or (override.is_add() and path not in names):
        return []
    if override.is_add() and not isinstance(override.value(), dict | list):
        return [f"{line(override)}: {path} exists already; leave out the +"]
    if override.is_delete() and path in names and path.split(".")[0] not in GROUPS:
        return [f"{line(override)}: the framework needs this key; it cannot be removed"]
    value = override.value()
    inside = paths(value, f"{path}.") if isinstance(value, dict) and not override.is_add() else []
    found = [unknown(each, known) for each in (path, *inside) if each not in names]
    return [found[0] + _beyond_yaml(override, path, base), *found[1:]] if path not in names else found


def _beyond_yaml(override: Override, path: str, base: DictConfig) -> str:
    """How to give a target a key that its yaml does not show; whether it takes it, its signature says later."""
    above, _, name = path.rpartition(".")
    node = OmegaConf.select(base, above) if above else None
    if override.is_delete() or not isinstance(node, DictConfig) or "_target_" not in node:
        return ""
    return f" If {str(node['_target_']).rpartition('.')[2]} has a parameter {name}, write +{line(override)}"


def harmless(override: Override, base: DictConfig, problems: list[str]) -> bool:
    """Hydra's own keys do nothing here, but for its help's; many could name code that Hydra would run."""
    path, choices = override.key_or_group, base.hydra.runtime.choices
    plain = override.is_add() or override.is_force_add() or override.is_delete()
    if path.startswith(("hydra.help.", "hydra.hydra_help.")):
        return True
    known = [each for each in choices if each.startswith("hydra/")]
    own = paths(as_written(base.hydra))
    known += [f"hydra.{each}" for each in own if not each.startswith("runtime.")]
    if path not in known and not plain:
        problems.append(unknown(path, known))
    elif plain or override.value() != (choices[path] if path in choices else _scalar(base, path)):
        several = re.match(r"hydra[./](mode|launcher|sweeper)\b", path)
        hint = "ask for several runs with -m" if several else "the files of a run go to run.dir"
        problems.append(f"{line(override)}: this has no effect here; {hint}")
    return False


def _scalar(base: DictConfig, path: str) -> Any:
    value: Any = as_written(base)
    for part in path.split("."):
        value = value[part]
    return getattr(value, "name", value)  # hydra.mode is an enumeration


def line(override: Override) -> str:
    """The word as it was typed."""
    assert override.input_line is not None
    return override.input_line
