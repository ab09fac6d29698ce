"""The yaml files of a lab: read as Hydra reads its own, but refused in words where they are broken."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf.errors import OmegaConfBaseException

from trainer.refusal import Refusal


class LabSource(FileConfigSource):
    """A folder of yaml files given by --config-dir, under a scheme of its own so that errors name the file."""

    @staticmethod
    def scheme() -> str:
        """The word before :// in Hydra's search path."""
        return "lab"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Refusal, with the line, where it is not valid YAML."""
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            return super().load_config(config_path)
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise Refusal(f"{file}{line}: this is not valid YAML: {error.problem}") from error
        except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
            raise Refusal(f"{file}: this is not valid YAML: {str(error).splitlines()[0]}") from error
