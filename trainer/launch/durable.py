"""Writing so that whoever reads sees the old file or the new one, after a crash too."""

import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes | str, lasting: bool = True) -> None:
    """Put a file in the place of another in one step; `lasting`: it also survives a power cut."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        # the bytes before the name: or a power cut could leave the new name with nothing in it
        if lasting:
            sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if lasting:
        sync(path.parent)


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
