"""Tensors that nothing trains: written once in a run, and shared by its checkpoints from then on, as links to one file.

A checkpoint has every file that it needs in its own folder, so it may be copied, moved and removed like any other. The
file system counts the links: the bytes go with the last of them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainer.launch.run_files import make_folder
from trainer.parallel.state_checks import prints
from trainer.records.checkpoint_store import DRAFT
from trainer.records.manifest import FROZEN, CorruptCheckpoint, Found, read_manifest


class Kept(NamedTuple):
    """A checkpoint on the disk, and what this rank has seen of the frozen tensors in it."""

    path: Path
    prints: Mapping[str, int]  # of each tensor's bits


class Links(NamedTuple):
    """Links to the files of an older checkpoint, in a folder of their own until the new one takes them."""

    folder: Path | None  # None: there are none
    files: Mapping[str, dict[str, Any]]  # name → size in bytes, sha256
    tensors: Collection[str]  # what these files hold

    def give(self, draft: Path) -> None:
        """Move them into a checkpoint that is being written."""
        if self.folder:
            for name in self.files:
                os.rename(self.folder / name, draft / name)

    def remove(self) -> None:
        """Drop those that nobody has taken."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


NONE = Kept(Path(os.devnull), {})
UNLINKED = Links(None, {}, ())


def as_read(found: Found, tensors: Mapping[str, Tensor]) -> Kept:
    """What a checkpoint holds of frozen tensors, given all that was read from it."""
    names = {name for file, held in found.headers.items() if file.startswith(FROZEN) for name in held}
    return Kept(found.path, prints({name: one for name, one in tensors.items() if name in names}))


def linked(folder: Path, kept: Kept) -> Links:
    """The main rank's: links to the files of frozen tensors in `kept`; none where there are no such files.

    None either where the file system has no links, or where the checkpoint is no longer there: all is written again.
    """
    draft = folder / f"{DRAFT}links-{secrets.token_hex(4)}"
    try:
        files = {name: one for name, one in read_manifest(kept.path).files.items() if name.startswith(FROZEN)}
        if not files:
            return UNLINKED
        make_folder(draft)
        for name, fact in files.items():
            os.link(kept.path / name, draft / name)
            there = (draft / name).lstat()
            if not stat.S_ISREG(there.st_mode) or there.st_size != fact["size"]:
                raise CorruptCheckpoint(name)
        return Links(draft, files, _held_by(draft, files))
    except Exception:  # whatever it is, nothing is lost by writing all
        shutil.rmtree(draft, ignore_errors=True)
        return UNLINKED


def _held_by(folder: Path, files: Collection[str]) -> set[str]:
    """The names of the tensors in these files; their headers alone are read."""
    if not files:
        return set()
    from safetensors import safe_open  # here: what it imports takes longer than a first step

    names: set[str] = set()
    for name in files:
        with safe_open(folder / name, "pt") as opened:
            names |= set(opened.keys())
    return names
