"""The pictures below a folder of classes: listed once on a machine, and kept until one of the folders changes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recipes.vision.cached import cache_folder
from recipes.vision.decode import ENDINGS
from trainer.messages import Refusal, escape_line, format_count

_KINDS = 4  # of files in a line
_KEPT = 64  # listings in the cache: 30 MB each for a million files
_ATTEMPTS = 3  # to list folders that change meanwhile
# Two changes within one tick of a file system's clock leave the same time: nanoseconds. FAT counts in 2 s.
_TICK, _COARSE_TICK = 50_000_000, 2_000_000_000

Folders = dict[str, tuple[int, int, int]]  # every folder that was read: inode, time of change, time of last write
Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Listing:
    """Files of classes, class by class, sorted within each.

    From the cache its arrays are the pages of one file, which all processes of a machine share.
    """

    folder: bytes
    counts: NDArray[numpy.int64]  # (C,): files of each class
    ends: NDArray[numpy.int64]  # (N,): where in `names` each name ends
    names: NDArray[numpy.uint8]  # (bytes,): the files' paths below the folder, without anything between them
    hashes: NDArray[numpy.uint32]  # (N,): CRC-32 of each file's own name
    others: NDArray[numpy.uint8]  # (bytes,): JSON, the endings of files that are no pictures by their names → how many

    def name(self, at: int) -> bytes:
        """The path of a file below the folder."""
        return self.names[self.ends[at - 1] if at else 0 : self.ends[at]].tobytes()


def list_pictures(folder: Path, classes: Sequence[str], allow_empty: bool = False) -> Listing:
    """The pictures of each class, those in its subfolders too. Refusal where a class has none, unless it may.

    Links are followed; hidden files are left out: macOS and Jupyter make copies of pictures.
    """
    listing = _listed(folder, classes)
    if (empty := numpy.flatnonzero(listing.counts == 0)).size and (not allow_empty or not listing.counts.any()):
        place = folder / classes[empty[0]]
        what = "has no pictures" if place.is_dir() else "is not there: a class of the training pictures"
        there = (
            f", and it has {found}"
            if (found := describe_others([Listing(b"", **_list(folder, [place.name])[1])]))
            else ""
        )
        raise Refusal(f"{escape_line(place)} {what}; expected files ending in {' '.join(ENDINGS)}{there}")
    return listing


def _listed(folder: Path, classes: Sequence[str]) -> Listing:
    try:
        cache = cache_folder()
    except Refusal:  # nowhere to keep it: every process lists the files
        return Listing(os.fsencode(folder), **_list(folder, classes)[1])
    place = cache / "listings" / f"{sha256(os.fsencode(folder.absolute())).hexdigest()[:32]}.safetensors"
    if (kept := _read(place, folder, classes)) is not None:
        return kept
    for _ in range(_ATTEMPTS):
        began, folders, arrays = time.time_ns(), *_list(folder, classes)
        times = [changed for _, changed, _ in folders.values()]
        tick = _TICK if any(changed % 1_000_000_000 for changed in times) else _COARSE_TICK
        # a change right after this listing would leave no other time than one right before it
        if began - tick > max(times):
            break
        time.sleep(tick / 1e9)
    with suppress(OSError):  # no room, or no cache at all: every process lists the files
        _write(place, folders, arrays)
    # the other processes read the same file; its pages need no memory of each
    return _read(place, folder, classes) or Listing(os.fsencode(folder), **arrays)


def _list(folder: Path, classes: Sequence[str]) -> tuple[Folders, Arrays]:
    """The folders, as they were before they were read, and the arrays of a listing."""
    folders: Folders = {}
    names, lengths, hashes, counts, others = bytearray(), [], [], [], Counter[str]()
    skipped = len(os.fsencode(os.path.join(folder, "")))
    for name in classes:
        # as objects a million paths take 100 MB: only those of one class are held at a time, as bytes below the folder
        files = []
        for path in _files_below(folder / name, folders):
            if path.lower().endswith(ENDINGS):
                files.append(os.fsencode(path)[skipped:])
            else:
                others[os.path.splitext(path)[1].lower()] += 1
        files.sort()
        names += b"".join(files)
        counts.append(len(files))
        lengths.append(numpy.fromiter(map(len, files), numpy.int64))
        own = (crc32(path[path.rfind(b"/") + 1 :]) for path in files)
        hashes.append(numpy.fromiter(own, numpy.uint32))
    return folders, {
        "counts": numpy.array(counts),
        "ends": numpy.concatenate(lengths).cumsum(),
        "names": numpy.frombuffer(names, numpy.uint8),
        "hashes": numpy.concatenate(hashes),
        "others": numpy.frombuffer(json.dumps(others).encode(), numpy.uint8),
    }


def describe_others(listings: Sequence[Listing]) -> str:
    """How many files are no pictures by their names, as `12 files (10 .heic, 2 .gif)`; empty: none."""
    counts = Counter[str]()
    for listing in listings:
        counts.update(json.loads(listing.others.tobytes()))
    kinds = [f"{count:,} {ending or 'without an ending'}" for ending, count in counts.most_common(_KINDS)]
    more = [f"{len(counts) - _KINDS} more kinds"] if len(counts) > _KINDS else []
    return f"{format_count(counts.total(), 'file')} ({escape_line(', '.join(kinds + more))})" if counts else ""


def _files_below(folder: Path, folders: Folders) -> Iterator[str]:
    """The files in a folder and in its subfolders, without hidden ones; the state of each folder goes into `folders`.

    Refusal where a link leads in a circle: the pictures of other classes would come with it.
    """
    waiting, seen = [str(folder)], set[str]()
    while waiting:
        # by another way it has been here: two links may lead to one folder
        if (place := os.path.realpath(at := waiting.pop())) in seen:
            continue
        seen.add(place)
        inner = []
        try:
            # the state before the names: what comes in between makes the cache old, not wrong
            folders[at] = _state(at)
            with os.scandir(at) as entries:
                for entry in entries:
                    # a link that is called like a picture is taken for one: to follow a million takes ten seconds
                    picture = entry.is_symlink() and entry.name.lower().endswith(ENDINGS)
                    if entry.name[0] != "." and not picture and entry.is_dir():
                        inner.append(entry.path)
                    elif entry.name[0] != ".":
                        yield entry.path
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Refusal(f"{escape_line(at)} cannot be read: {error.strerror}") from error
        for path in sorted(inner):  # on every disk the same one is named
            if os.path.islink(path) and Path(place).is_relative_to(goal := os.path.realpath(path)):
                raise Refusal(
                    f"{escape_line(path)} is a link to {escape_line(goal)}, a folder that it lies in: remove the link"
                )
        waiting += sorted(inner, reverse=True)


def _state(folder: str | bytes) -> tuple[int, int, int]:
    """What another folder in its place, and each change of its entries, would change; nobody can set ctime back."""
    found = os.stat(folder)
    return found.st_ino, found.st_ctime_ns, found.st_mtime_ns


def _read(place: Path, folder: Path, classes: Sequence[str]) -> Listing | None:
    """The listing in the cache; None where there is none, or a folder is not as it was."""
    try:
        with safe_open(place, "pt") as file:
            # as tensors of torch they are the file's pages; numpy's would be copies
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        folders, states = arrays.pop("folders").tobytes().split(b"\0"), arrays.pop("states").tolist()
        listing = Listing(os.fsencode(folder), **arrays)
        current = [list(_state(path)) for path in folders]
    except (OSError, SafetensorError, KeyError, TypeError):  # also what another version has written
        return None
    wanted = {os.fsencode(folder / name) for name in classes}
    whole = len(listing.counts) == len(classes) and int(listing.ends[-1:].sum()) == len(listing.names)
    if not whole or states != current or not wanted <= {*folders}:
        return None
    with suppress(OSError):
        os.utime(place)  # used last by …
    return listing


def _write(place: Path, folders: Folders, arrays: Arrays) -> None:
    """Keep a listing, in one step of the file system; those that were not used for longest go."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_suffix(f".{os.getpid()}")
    paths = b"\0".join(map(os.fsencode, folders))
    states = {"folders": numpy.frombuffer(paths, numpy.uint8), "states": numpy.array([*folders.values()])}
    try:
        save_file(arrays | states, draft)
        os.replace(draft, place)
    except SafetensorError as error:  # what it says of a full disk, too
        raise OSError(str(error)) from error
    finally:
        draft.unlink(missing_ok=True)
    for old in sorted(place.parent.iterdir(), key=os.path.getmtime)[:-_KEPT]:
        old.unlink()
