"""Files and folders of a run, opened by their own names: no link is followed, and nothing but regular files is opened.

A run's folder may come from a stranger. A link in it could lead what a run writes into any file of the user's, and a
pipe would keep it waiting for ever. The folder itself may be reached through links, which the user has made: `real`
follows those, once; so whatever link is met behind it was put there by somebody else.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import cast

from trainer.refusal import Refusal
from trainer.safe_names import shown

_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Strange(Refusal, OSError):
    """A link, a pipe or a device in the folder of a run. For who reads it is a file that cannot be read."""

    def __init__(self, path: str | Path, what: str) -> None:
        super().__init__(
            f"{shown(path)} is {what}: in a run's folder no link is followed, and nothing is opened but regular files."
            " Remove it; a folder on another disk is chosen with run.root or run.dir"
        )
        self.strerror = f"it is {what}, which is not opened in a run's folder"


def real(path: str | Path) -> Path:
    """The folder that the user means, through whatever links lead there; none is left in its name."""
    with suppress(ValueError):  # a null byte, which whoever opens it will meet
        return Path(os.path.realpath(path))
    return Path(path)


def opener(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file, for `open`. Strange where it is none, or where a part of its path is a link."""
    path = Path(path)
    folder = _entered(path.parent, make=False)
    try:
        # not to wait for the other end of a pipe
        found = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Strange(path, kind(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise Strange(path, kind(path))
    return found


def open_file(path: Path, mode: str, buffering: int = -1) -> BufferedRandom:
    """A regular file, as `open` opens it for bytes (mode: rb, ab, r+b, xb …). Strange, or OSError."""
    return cast(BufferedRandom, open(path, mode, buffering, opener=opener))


def make_folder(path: Path) -> Path:
    """The folder, made with those above it where there are none. Strange where one of them is a link, or a file."""
    os.close(_entered(path, make=True))
    return path


def refuse_strange(folder: Path) -> None:
    """Strange for the first link, pipe or device that a run would meet in its folder, or in that of a job."""
    for place in (folder, folder / "logs", folder / "tensorboard"):
        if place.is_dir() and not place.is_symlink():
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
                if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
                    raise Strange(entry.path, kind(entry.path))


def kind(path: str | Path) -> str:
    """What stands there, in words."""
    if os.path.islink(path):
        return f"a link to {shown(os.readlink(path))}"
    return "a folder" if os.path.isdir(path) else "no regular file"


def _entered(path: Path, make: bool) -> int:
    """A descriptor of this folder, reached from the root by folders alone; make: those that are not there."""
    path = path.absolute()
    at, so_far = os.open(path.anchor, _PASS), Path(path.anchor)
    for name in path.parts[1:]:
        above, so_far = at, so_far / name
        try:
            if make:
                _made(name, above)
            at = os.open(name, _PASS, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Strange(so_far, kind(so_far)) from None
            raise OSError(error.errno, error.strerror, str(so_far)) from None
        finally:
            os.close(above)
    return at


def _made(name: str, above: int) -> None:
    """Make a folder of this name, unless there is one. Not tried where there is: a disk may be read-only above it."""
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(name, dir_fd=above)
