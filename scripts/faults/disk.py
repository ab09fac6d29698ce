"""A disk of its own for a run, which can be filled: a tmpfs, where this user may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPACE = 4 * 2**30  # bytes of an empty one; memory is used only for what is written


class Disk:
    """A folder as it is, which cannot be filled."""

    can_fill = False

    def fill(self) -> None:
        """Leave no space."""
        raise NotImplementedError("only a disk of its own can be filled")

    def free(self) -> None:
        """Have space again."""


class Mounted(Disk):
    """A tmpfs. It is full when its size is what it holds; so no memory is spent on filling it."""

    can_fill = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Leave no space."""
        held = os.statvfs(self._path)
        self._resize((held.f_blocks - held.f_bfree) * held.f_frsize)

    def free(self) -> None:
        """Have space again."""
        self._resize(SPACE)

    def _resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self._path)], check=True)


@contextmanager
def disk(path: Path) -> Iterator[Disk]:
    """Mount one at this folder, for as long as the context lasts; the folder as it is where that is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={SPACE}", "chaos", str(path)]
    try:
        mounted = subprocess.run(words, capture_output=True).returncode == 0
    except OSError:  # no such program
        mounted = False
    try:
        yield Mounted(path) if mounted else Disk()
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
