"""Data sets that are downloaded once for all runs of a user."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from trainer.messages import Refusal

_PATIENCE = 5.0  # seconds for a silent server


def cache_folder() -> Path:
    """Where a user's processes keep what they need not make or download twice. Refusal for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"
    except RuntimeError as error:  # a container that was given a number of a user, and no HOME
        raise Refusal(
            f"user {os.getuid()} has no home folder, in which data sets are kept: set XDG_CACHE_HOME to a folder"
        ) from error


def cached(name: str, files: Iterable[Path], download: Callable[[Path], None], remedy: str) -> Path:
    """The folder of downloads, with these files in it: the first process that comes calls `download(folder)`.

    files: as they lie in that folder. Refusal with the remedy where they cannot be had.
    """
    cache = cache_folder()
    wanted = [cache / file for file in files]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process releases it
            if not all(file.is_file() for file in wanted):
                patiently(download, cache)
    except (OSError, RuntimeError) as error:
        raise Refusal(
            f"{name} is not on this machine and cannot be downloaded ({_last_line(error)}): {remedy}"
        ) from error
    return cache


def patiently(download: Callable[[Path], None], cache: Path) -> None:
    """Download, but do not wait long for a server that says nothing."""
    usual = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        download(cache)
    finally:
        socket.setdefaulttimeout(usual)


def _last_line(error: BaseException) -> str:
    """The reason itself: torchvision's message lists the mirrors first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
