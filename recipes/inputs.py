"""New files for a trained network: one of them, a folder, a pattern, or a list of them in a text file."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path

import numpy

from trainer.messages import Refusal, expand_home

_SNIFFED = 4096  # bytes that tell text from other files


class Listed:
    """Paths in an order, in one array: of a list every worker process would in time hold a copy."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = numpy.array([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> str:
        return os.fsdecode(bytes(self._paths[at]))


def listed(where: str, endings: Sequence[str], listing: bool) -> list[str]:
    """The files that `job.inputs=WHERE` means, sorted. Refusal where there are none.

    Of folders, and of what a pattern matches, those with these endings; a file that is named counts whatever it is
    called. listing: a file of text that has none of the endings is a list, a path a line.
    """
    path = expand_home(where)
    if path.is_dir():
        found = _with(_below(path), endings)
    elif path.is_file():
        is_list = listing and not str(path).lower().endswith(tuple(endings)) and _is_text(path)
        found = _lines(path) if is_list else [str(path)]
    elif has_magic(where):
        every = glob(str(path), recursive=True)
        found = _with(
            (file for each in every for file in (_below(Path(each)) if os.path.isdir(each) else [each])), endings
        )
    else:
        raise Refusal(f"job.inputs={where}: there is no such file or folder, seen from {Path.cwd()}")
    if not found:
        raise Refusal(f"job.inputs={where}: nothing was found there; expected files ending in {' '.join(endings)}")
    return sorted(found)


def _with(files: Iterator[str], endings: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(file for file in files if file.lower().endswith(tuple(endings))))


def _below(folder: Path) -> Iterator[str]:
    """The files in a folder and its subfolders, without hidden ones. A folder that a link leads back to counts once."""
    seen: set[tuple[int, int]] = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        with suppress(OSError):
            place = os.stat(at)
            if (place.st_dev, place.st_ino) in seen:
                folders.clear()
                continue
            seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (os.path.join(at, name) for name in names if name[0] != ".")


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFFED)
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except (OSError, UnicodeDecodeError):
        return False
    return bool(start.strip()) and b"\0" not in start


def _lines(path: Path) -> list[str]:
    """The paths in a list: seen from the present folder, or else from that of the list."""
    with path.open("rb") as file:
        written = [os.fsdecode(line.strip(b"\r\n")) for line in file if line.strip()]
    paths = [str(expand_home(line)) if line.startswith("~") else line for line in written]
    return [each if os.path.exists(each) else os.path.join(path.parent, each) for each in paths]
