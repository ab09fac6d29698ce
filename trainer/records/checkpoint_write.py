"""One checkpoint is written: a draft, its files, the manifest, the name. What happens on the way costs this one alone.

Who writes, and when, others know (async_save.py); all of it is collective over the ranks that are given.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.launch.atomic_files import sync
from trainer.launch.file_validation import readable
from trainer.launch.no_symlinks import make_folder
from trainer.parallel.all_or_none import together
from trainer.parallel.finite_check import not_finite
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint_store import DRAFT, put_in_place
from trainer.records.frozen_tensor_links import Links
from trainer.records.manifest import MANIFEST, STATE, Manifest, encode, manifest_bytes, sha256_of
from trainer.records.writers import FailedSave, Share


class BrokenState(Exception):
    """What was to be saved is not finite: `tensors` names some of it, the same on every rank."""

    def __init__(self, step: int, tensors: list[str]) -> None:
        super().__init__(f"what was to be saved of step {step} is not finite: {', '.join(tensors)}")
        self.step, self.tensors = step, tensors


@dataclass(frozen=True)
class Contents:
    """What one checkpoint is to hold. Nothing changes it while it is written."""

    step: int
    held: Mapping[str, Tensor]  # what this rank writes: whole tensors and shards
    share: Share  # where these belong, and what the others write
    state: dict[str, Any]  # as JSON takes it
    figures: dict[str, float]
    finite: Collection[str]  # the names of tensors that must be finite
    frozen: Collection[str]  # the names of those that nothing trains: files of their own
    links: Links  # to files of an older checkpoint that hold these already; the main rank has them


def write(folder: Path, ranks: Ranks, contents: Contents, facts: Mapping[str, Any]) -> None:
    """Collective: write a checkpoint; it has its name once it is whole.

    FailedSave on all ranks or none; BrokenState on all, before a byte is written, where numbers are not finite.
    """
    step, needed = contents.step, contents.share.bytes + 2**20  # headers and JSON
    # a name that does not count: a crash from here to the commit leaves the older checkpoints as they were; and one
    # that the main rank draws for all, as ranks of a dead attempt may still be writing to theirs
    draft = folder / f"{DRAFT}step-{step}-{ranks.all_gather_values(secrets.token_hex(4))[0]}"
    try:
        # ranks wait for each other after each phase: one that fails stops all before the next
        _look(ranks, contents)
        together(ranks, partial(_begin, ranks, draft, needed, contents.links), FailedSave)
        together(ranks, partial(_write, ranks, draft, contents), FailedSave)
        # the manifest last, then the name: who sees the name sees a checkpoint that is whole and on the disk
        files = _seal(ranks, draft, contents.links)
        manifest = Manifest(named(folder, step), step, dict(facts), contents.figures, files)
        together(ranks, partial(_commit, ranks, draft, manifest), FailedSave)
    except FailedSave as error:
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise FailedSave(
            f"the checkpoint of step {step} could not be written to {folder}: {error}. It needs about "
            f"{needed:,} bytes, {free:,} are free there; the older checkpoints are intact"
        ) from error
    finally:
        if ranks.is_main:  # after a failed save; a finished draft has moved to its name
            shutil.rmtree(draft, ignore_errors=True)
            contents.links.remove()


def named(folder: Path, step: int) -> Path:
    """The final name of a checkpoint; the digits are for people."""
    return folder / f"step-{step:08d}"


def _look(ranks: Ranks, contents: Contents) -> None:
    """Collective: BrokenState where a number of what is to be written is not finite."""
    watched = {name: one for name, one in contents.held.items() if name in contents.finite}
    broken = together(ranks, lambda: not_finite(watched)[:1], FailedSave)
    if any(broken):
        said = [f"{name} on rank {rank}" for rank, names in enumerate(broken) for name in names]
        raise BrokenState(contents.step, said)


def _begin(ranks: Ranks, draft: Path, needed: int, links: Links) -> None:
    """Main rank: a draft with nothing but links in it, where there is space for what is coming."""
    if ranks.is_main:
        make_folder(draft.parent)
        # before a byte is written: filling the disk up would hurt others, too
        if shutil.disk_usage(draft.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
        links.give(draft)


def _write(ranks: Ranks, draft: Path, contents: Contents) -> None:
    """This rank's tensors, and on the main rank what JSON takes."""
    from trainer.records.tensor_files import write_tensors  # here: what it imports takes longer than first steps

    if contents.held:
        write_tensors(draft, contents.held, contents.share, contents.frozen, ranks.rank)
    if ranks.is_main:
        (draft / STATE).write_bytes(readable(encode(contents.state), STATE))


def _seal(ranks: Ranks, draft: Path, links: Links) -> dict[str, dict[str, Any]]:
    """Collective: what really lies there, brought to the disk and hashed; shared out, for reading it takes time.

    Of links it is known: they are on the disk, and read again when somebody verifies the checkpoint.
    """
    listed = together(ranks, lambda: sorted({*os.listdir(draft)} - links.files.keys()), FailedSave)[0]
    mine = listed[ranks.rank :: ranks.size]
    sealed = together(ranks, lambda: {name: _sealed(draft / name) for name in mine}, FailedSave)
    return {**links.files, **{name: fact for own in sealed for name, fact in own.items()}}


def _sealed(path: Path) -> dict[str, Any]:
    """What is to be known of a file, once it is on the disk."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def _commit(ranks: Ranks, draft: Path, manifest: Manifest) -> None:
    """Main rank: manifest, then the name, each on the disk before the next."""
    if ranks.is_main:
        (draft / MANIFEST).write_bytes(manifest_bytes(manifest))
        sync(draft / MANIFEST)
        sync(draft)
        put_in_place(draft, manifest.path)
