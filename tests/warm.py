"""On its way out: see tests/run.py and tests/ranks.py."""

from pathlib import Path
from typing import Any

from tests.ranks import fork_command
from tests.run import ROOT as ROOT


def _fork(words: list[str], cwd: Path, environment: dict[str, str], screen: int) -> Any:
    return fork_command(words, cwd, environment, Path(f"/proc/self/fd/{screen}").resolve())


Forked: Any = _fork
