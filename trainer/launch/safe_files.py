"""Opens and replaces files of a run safely: no file is a link or a device; a replaced file is never half new.

A run's folder may come from a stranger. A link in it could lead what a run writes into any file of the user's, and a
pipe would keep it waiting for ever. Folders in it may be links: people keep checkpoints on another disk.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import cast

from trainer.messages import Refusal, escape_line


class UnsafeFile(Refusal, OSError):
    """A link, a pipe or a device in the folder of a run. For who reads it is a file that cannot be read."""

    def __init__(self, path: str | Path, what: str) -> None:
        super().__init__(
            f"{escape_line(path)} is {what}: in a run's folder nothing is opened but regular files, and folders, which"
            " may be links to others. Remove it"
        )
        self.strerror = f"it is {what}, which is not opened in a run's folder"


def resolve_links(path: str | Path) -> Path:
    """The folder that the user means, through whatever links lead there; none is left in its name."""
    with suppress(ValueError):  # a null byte, which whoever opens it will meet
        return Path(os.path.realpath(path))
    return Path(path)


def open_descriptor(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file, for `open`. UnsafeFile where it is none."""
    try:
        # O_NOFOLLOW: of the name alone, not of folders before it; O_NONBLOCK: not to wait for the other end of a pipe
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsafeFile(path, describe_entry(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFile(path, describe_entry(path))
    return descriptor


def open_file(path: Path, mode: str, buffering: int = -1) -> BufferedRandom:
    """A regular file, as `open` opens it for bytes (mode: rb, ab, r+b, xb …). UnsafeFile, or OSError."""
    return cast(BufferedRandom, open(path, mode, buffering, opener=open_descriptor))


def make_folder(path: Path) -> Path:
    """The folder, made with those above it where there are none. UnsafeFile where one of them is a file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        folders = (*reversed(path.parents), path)
        wrong = next(place for place in folders if os.path.lexists(place) and not place.is_dir())
        raise UnsafeFile(wrong, describe_entry(wrong)) from None
    return path


def refuse_unsafe_files(folder: Path) -> None:
    """UnsafeFile for the first linked file, pipe or device that a run would meet in its folder, or in that of a job."""
    for place in (folder, folder / "logs", folder / "tensorboard"):
        if place.is_dir():
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
                if not entry.is_dir() and not entry.is_file(follow_symlinks=False):
                    raise UnsafeFile(entry.path, describe_entry(entry.path))


def describe_entry(path: str | Path) -> str:
    """What kind of thing is there, for messages."""
    if os.path.islink(path):
        return f"a link to {escape_line(os.readlink(path))}"
    return "a folder" if os.path.isdir(path) else "no regular file"


_FULL_BELOW = 2**20  # bytes; a disk with less than that counts as full


def replace_file(path: Path, data: bytes | str | Iterator[bytes], lasting: bool = True) -> None:
    """Put a file in the place of another in one step; `lasting`: it also survives a power cut.

    A link that stands in that place goes, and what it led to stays.
    """
    # in the same folder, so that the replacement is one step of the file system
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with open_file(draft, "xb") as file:
            file.writelines([data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data)
        # the bytes before the name: or a power cut could leave the new name with nothing in it
        if lasting:
            fsync_path(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if lasting:
        fsync_path(path.parent)


def overwrite_in_place(path: Path, data: bytes) -> None:
    """Put other bytes into a file, in the room that it has: on a full disk there is none for a second file.

    A few of them, or a crash could leave some old ones. OSError, and the old bytes, where there are too many.
    """
    with open_file(path, "r+b", buffering=0) as file:
        before = file.read()
        # nothing is given back before the new bytes stand there: another program would take it at once
        if os.pwrite(file.fileno(), data.ljust(len(before)), 0) < len(data):
            os.pwrite(file.fileno(), before, 0)
            file.truncate(len(before))
            raise disk_full_error(path)
        file.truncate(len(data))
        os.fsync(file.fileno())


def refuse_full_disk(folder: Path) -> None:
    """OSError where the disk of a folder is full: for what would be left half written. Takes a microsecond."""
    if shutil.disk_usage(folder).free < _FULL_BELOW:
        raise disk_full_error(folder)


def disk_full_error(path: Path) -> OSError:
    """What the system says of a disk without space; it says nothing where it has taken a part of what it was given."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def fsync_path(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def probe_write(folder: Path) -> None:
    """A real write: mode bits say little to root, on full disks and on read-only mounts."""
    path = folder / f".probe-{secrets.token_hex(4)}"
    try:
        path.write_bytes(b"x" * 4096)
        fsync_path(path)
    finally:
        path.unlink(missing_ok=True)
