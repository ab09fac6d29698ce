"""Shared memory that a command has left behind."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    """What is there. Not semaphores, which say nothing of whose they are and lose their names at once."""
    found = FOLDER.iterdir() if FOLDER.is_dir() else []
    return {path.name for path in found if path.is_file() and not path.name.startswith("sem.")}


def left(before: set[str]) -> list[str]:
    """What is there now and was not before, unless a process that lives has its number in the name: another one's."""
    return sorted(name for name in names() - before if not any(map(_lives, re.findall(r"\d+", name))))


def _lives(number: str) -> bool:
    return Path(f"/proc/{number}/stat").exists()
