"""On its way out: see tests/run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.run import MARK as MARK
from tests.run import PATIENCE as PATIENCE
from tests.run import ROOT as ROOT
from tests.run import SMALL as SMALL
from tests.run import SPLIT as SPLIT
from tests.run import TRANSFORMER as TRANSFORMER
from tests.run import Command as NewCommand
from tests.run import Finished, curve, far, files_below, lines, status

__all__ = ["curve", "far", "files_below", "lines", "status"]
Ended: Any = Finished
Finished.screen = property(lambda ended: ended.out)  # type: ignore[attr-defined]


class Command(NewCommand):
    def __init__(self, arguments: list[str], cwd: Path, environment: dict[str, str] | None = None) -> None:
        super().__init__(arguments, cwd, environment)

    def end(self) -> Any:
        return super().end()


def single(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *words]


def torchrun(count: int, *words: str, flags: tuple[str, ...] = ()) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *flags]
    return [*launcher, "-m", "trainer", *words]


def finish(arguments: list[str], cwd: Path, code: int = 0, environment: dict[str, str] | None = None) -> str:
    ended: Any = Command(arguments, cwd, environment).end()
    assert ended.code == code, f"exit code {ended.code}, not {code}:\n{ended.out[-6000:]}"
    assert ended.left == []
    assert code or not ended.litter, ended.litter
    return ended.out


def finish_all(commands: list[list[str]], cwd: Path, codes: int | list[int] = 0) -> list[str]:
    wanted = [codes] * len(commands) if isinstance(codes, int) else codes
    return [finish(command, cwd, code) for command, code in zip(commands, wanted, strict=True)]
