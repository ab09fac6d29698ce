"""A cache of blocks on the local disk, of bounded size, which all processes of a machine share.

A process may be killed at any moment: a block has its name only when it is whole, and locks end with their process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCKS = 256  # files; blocks that share one wait for each other


class BlockCache:
    """Files of bytes below a folder, by number."""

    def __init__(self, folder: Path, limit: int) -> None:
        """limit: bytes of all blocks together, those that are being written among them."""
        self._folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, number: int, start: int, size: int) -> bytes | None:
        """These bytes of a block; None where it is not here."""
        try:
            with self._path(number).open("rb") as file:
                os.utime(file.fileno())  # used just now: others are removed first
                return os.pread(file.fileno(), size, start)
        except FileNotFoundError:
            return None

    def holds(self, number: int) -> bool:
        """Is a block here?"""
        return self._path(number).exists()

    def remove(self, number: int) -> None:
        """Forget a block."""
        self._path(number).unlink(missing_ok=True)

    def fill(self, number: int, size: int, fetch: Callable[[], bytes], wait: bool = True) -> None:
        """Have a block here, which `fetch` reads; one process does, and others wait for it.

        size: about how many bytes. wait: False: nothing is done where another process is at it.
        """
        with self._lock(f"block-{number % _LOCKS}", wait) as locked:
            if not locked or self.holds(number):
                return
            # the draft of a process that was killed has the same name, and is written over
            draft = self._path(number).with_suffix(".draft")
            with self._lock("room", wait=True):
                self._make_room(size)
                with draft.open("wb") as file:
                    file.truncate(size)  # takes its room before it is there
            try:
                draft.write_bytes(fetch())
                draft.rename(self._path(number))
            finally:
                draft.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove the blocks that were used longest ago, until one of this size fits."""
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # another process has just renamed it
                if entry.name.endswith((".block", ".draft")):
                    files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        total = sum(held for _, held, _ in files) + size
        # drafts are of processes at work: only whole blocks go
        for _, held, path in sorted(file for file in files if file[2].endswith(".block")):
            if total <= self._limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= held

    @contextmanager
    def _lock(self, name: str, wait: bool) -> Iterator[bool]:
        """Hold a lock among the processes of this machine; False where another one does and nobody waits."""
        with (self._folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.block"
