"""The yaml files of a lab: read like Hydra's own, but refused in words where they are broken or blow up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf.errors import OmegaConfBaseException

from trainer.refusal import Refusal

BUDGET = 10_000  # values that aliases may add to a file; nine lines of nested aliases can stand for millions


class LabSource(FileConfigSource):
    """A folder of yaml files given by --config-dir, under a scheme of its own so that each file is looked at first."""

    @staticmethod
    def scheme() -> str:
        """The word before :// in Hydra's search path."""
        return "lab"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Refusal where it is no yaml or its aliases stand for too much."""
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():
            inspect(file)
        try:
            return super().load_config(config_path)
        except yaml.MarkedYAMLError as error:  # a key that stands twice is only found here
            raise _broken(file, error) from error
        except OmegaConfBaseException as error:
            raise Refusal(f"{file}: {str(error).splitlines()[0]}") from error


def inspect(file: Path) -> None:
    """Refuse a file that is no yaml, or whose aliases stand for more than the budget, before anything expands them."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        expanded, stood = _size(root), _nodes(root)
    except yaml.MarkedYAMLError as error:
        raise _broken(file, error) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refusal(f"{file}: this is not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError:
        raise Refusal(f"{file}: nested too deeply, or an alias contains itself") from None
    except OSError as error:
        raise Refusal(f"{file}: cannot be read: {error.strerror}") from error
    if expanded - stood > BUDGET:
        raise Refusal(f"{file}: its aliases stand for {expanded:,} values; at most {BUDGET:,} are taken")


def _broken(file: Path, error: yaml.MarkedYAMLError) -> Refusal:
    line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
    return Refusal(f"{file}{line}: this is not valid YAML: {error.problem}")


def _parts(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _size(root: Any) -> int:
    """How many values there are when every alias is replaced by what it stands for; each node is counted once."""
    known: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in known:
            known[id(node)] = 1 + sum(size(part) for part in _parts(node))
        return known[id(node)]

    return size(root)


def _nodes(root: Any) -> int:
    """How many values stand in the file."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting += _parts(node)
    return len(seen)
