"""Writing so that whoever reads sees the old file or the new one, after a crash too; and on a full disk."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer.launch.no_symlinks import open_file

_SPARE = 2**20  # bytes; a disk with less than that counts as full


def replace_file(path: Path, data: bytes | str | Iterator[bytes], lasting: bool = True) -> None:
    """Put a file in the place of another in one step; `lasting`: it also survives a power cut.

    No link is followed on the way there; one that stands in that place goes, and what it led to stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with open_file(draft, "xb") as file:
            file.writelines([data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data)
        # the bytes before the name: or a power cut could leave the new name with nothing in it
        if lasting:
            sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if lasting:
        sync(path.parent)


def overwrite(path: Path, data: bytes) -> None:
    """Put other bytes into a file, in the room that it has: on a full disk there is none for a second file.

    A few of them, or a crash could leave some old ones. OSError, and the old bytes, where there are too many.
    """
    with open_file(path, "r+b", buffering=0) as file:
        before = file.read()
        # nothing is given back before the new bytes stand there: another program would take it at once
        if os.pwrite(file.fileno(), data.ljust(len(before)), 0) < len(data):
            os.pwrite(file.fileno(), before, 0)
            file.truncate(len(before))
            raise full(path)
        file.truncate(len(data))
        os.fsync(file.fileno())


def refuse_full(folder: Path) -> None:
    """OSError where the disk of a folder is full: for what would be left half written. Takes a microsecond."""
    if shutil.disk_usage(folder).free < _SPARE:
        raise full(folder)


def full(path: Path) -> OSError:
    """What the system says of a disk without space; it says nothing where it has taken a part of what it was given."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def probe(folder: Path) -> None:
    """A real write: mode bits say little to root, on full disks and on read-only mounts."""
    path = folder / f".probe-{secrets.token_hex(4)}"
    try:
        path.write_bytes(b"x" * 4096)
        sync(path)
    finally:
        path.unlink(missing_ok=True)
