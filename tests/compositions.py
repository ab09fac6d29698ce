"""What Hydra composes of the framework's own yaml, remembered: it takes most of the time of a small run's start."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

from omegaconf import DictConfig

from trainer.configuration import compose
from trainer.configuration.command_line import CommandLine

_compose_with_hydra = compose.compose_with_hydra
_own_dir = compose.resource_root() / "conf"
_done: dict[tuple[str, ...], DictConfig] = {}


def _once(command: CommandLine, chosen: Sequence[str], config_dirs: list[Path]) -> DictConfig:
    """A copy of what these choices gave before. Not with a lab, whose files may have changed since."""
    if config_dirs != [_own_dir]:
        return _compose_with_hydra(command, chosen, config_dirs)
    key = (command.config_name, *chosen)
    if key not in _done:
        _done[key] = _compose_with_hydra(command, chosen, config_dirs)
    return deepcopy(_done[key])


remembered = patch.object(compose, "compose_with_hydra", _once)
