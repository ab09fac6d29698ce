"""Opens and replaces files of a run safely: no link is followed, no device opened; a replaced file is never half new.

A run's folder may come from a stranger. A link in it could lead what a run writes into any file of the user's, and a
pipe would keep it waiting for ever. The folder itself may be reached through links, which the user has made: `real`
follows those, once; so whatever link is met behind it was put there by somebody else.
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

_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFile(Refusal, OSError):
    """A link, a pipe or a device in the folder of a run. For who reads it is a file that cannot be read."""

    def __init__(self, path: str | Path, what: str) -> None:
        super().__init__(
            f"{escape_line(path)} is {what}: in a run's folder no link is followed, and nothing is opened but regular"
            " files. Remove it; a folder on another disk is chosen with run.root or run.dir"
        )
        self.strerror = f"it is {what}, which is not opened in a run's folder"


def resolve_links(path: str | Path) -> Path:
    """The folder that the user means, through whatever links lead there; none is left in its name."""
    with suppress(ValueError):  # a null byte, which whoever opens it will meet
        return Path(os.path.realpath(path))
    return Path(path)


def open_descriptor(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file, for `open`. UnsafeFile where it is none, or a part of its path is a link."""
    path = Path(path)
    folder = _open_folder(path.parent, make=False)
    try:
        # O_NONBLOCK: not to wait for the other end of a pipe
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsafeFile(path, describe_entry(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFile(path, describe_entry(path))
    return descriptor


def open_file(path: Path, mode: str, buffering: int = -1) -> BufferedRandom:
    """A regular file, as `open` opens it for bytes (mode: rb, ab, r+b, xb …). UnsafeFile, or OSError."""
    return cast(BufferedRandom, open(path, mode, buffering, opener=open_descriptor))


def make_folder(path: Path) -> Path:
    """The folder, made with those above it where there are none. UnsafeFile where one of them is a link, or a file."""
    os.close(_open_folder(path, make=True))
    return path


def refuse_unsafe_files(folder: Path) -> None:
    """UnsafeFile for the first link, pipe or device that a run would meet in its folder, or in that of a job."""
    for place in (folder, folder / "logs", folder / "tensorboard"):
        if place.is_dir() and not place.is_symlink():
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
                if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
                    raise UnsafeFile(entry.path, describe_entry(entry.path))


def describe_entry(path: str | Path) -> str:
    """What kind of thing is there, for messages."""
    if os.path.islink(path):
        return f"a link to {escape_line(os.readlink(path))}"
    return "a folder" if os.path.isdir(path) else "no regular file"


def _open_folder(path: Path, make: bool) -> int:
    """A descriptor of this folder, reached from the root by folders alone; make: those that are not there."""
    path = path.absolute()
    # name by name, each below the descriptor of its parent: nobody can put a link in between meanwhile
    descriptor, so_far = os.open(path.anchor, _FOLDER_FLAGS), Path(path.anchor)
    for name in path.parts[1:]:
        above, so_far = descriptor, so_far / name
        try:
            if make:
                _make_one_folder(name, above)
            descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnsafeFile(so_far, describe_entry(so_far)) from None
            raise OSError(error.errno, error.strerror, str(so_far)) from None
        finally:
            os.close(above)
    return descriptor


def _make_one_folder(name: str, above: int) -> None:
    """Make a folder of this name, unless there is one. Not tried where there is: a disk may be read-only above it."""
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(name, dir_fd=above)


_FULL_BELOW = 2**20  # bytes; a disk with less than that counts as full


def replace_file(path: Path, data: bytes | str | Iterator[bytes], lasting: bool = True) -> None:
    """Put a file in the place of another in one step; `lasting`: it also survives a power cut.

    No link is followed on the way there; one that stands in that place goes, and what it led to stays.
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
