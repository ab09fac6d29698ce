"""Checkpoints: a folder of tensors and facts that is written whole or not at all, and verified before it is used.

Tensors go to safetensors files under their own names, sharded ones in parallel; everything else to JSON. Any number of
processes reads what any other number wrote.
"""

import errno
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.launch.durable import sync
from trainer.parallel.ranks import Ranks
from trainer.records.manifest import (
    MANIFEST,
    STATE,
    CorruptCheckpoint,
    Found,
    Manifest,
    encode,
    manifest_bytes,
    sha256_of,
)
from trainer.records.shelf import (
    DRAFT,
    committed,
    discard,
    newest_in,
    put_in_place,
    score,
    surplus,
    sweep,
    together,
)


class FailedSave(Exception):
    """A checkpoint could not be written; the older ones are as they were."""


class Checkpoints:
    """The checkpoints/ folder of a run, which this run alone writes to."""

    def __init__(
        self, folder: Path, ranks: Ranks, keep: int = 3, best: str = "-loss", facts: dict[str, Any] | None = None
    ):
        self.folder, self.ranks, self.keep, self.best = folder, ranks, keep, best
        self.facts = {"world_size": ranks.size, **(facts or {})}  # of every manifest: strategy, …
        self._rejected: set[Path] = set()  # found corrupt; they count for nothing when others are removed
        self._record = -math.inf  # the best score so far
        if ranks.is_main:
            sweep(folder)

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], figures: dict[str, float] | None = None
    ) -> Path:
        """Write one checkpoint; it has its name once it is whole. Collective; FailedSave on all ranks or none.

        tensors: what this rank holds. Those that are whole are equal on every rank that has them; not all ranks need
        have the same.
        """
        ranks = self.ranks
        # all ranks tell names and bytes: is there space, and does each hold all of it whole, so that one can write all?
        held = ranks.all_gather_values({name: one.numel() * one.element_size() for name, one in tensors.items()})
        sizes = {name: size for one in held for name, size in one.items()}
        alone = not any(isinstance(one, DTensor) for one in tensors.values()) and all(one == held[0] for one in held)
        needed = sum(sizes.values()) + 2**20  # headers and JSON
        # a name that does not count: a crash from here to the commit leaves the older checkpoints as they were; and one
        # that the main rank draws for all, as ranks of a dead attempt may still be writing to theirs
        draft = self.folder / f"{DRAFT}step-{step}-{ranks.all_gather_values(secrets.token_hex(4))[0]}"
        try:
            # ranks wait for each other after each phase: one that fails stops all before the next
            together(ranks, lambda: self._begin(draft, needed), FailedSave)
            together(ranks, lambda: self._write(draft, tensors, state, list(sizes), alone), FailedSave)
            # the manifest last, then the name: who sees the name sees a checkpoint that is whole and on the disk
            path, files = self.folder / f"step-{step:08d}", self._seal(draft)  # the digits are for people
            manifest = Manifest(path, step, self.facts, figures or {}, files)
            together(ranks, lambda: self._commit(draft, manifest), FailedSave)
        except FailedSave as error:
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise FailedSave(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. It needs about "
                f"{needed:,} bytes, {free:,} are free there; the older checkpoints are intact"
            ) from error
        finally:
            if ranks.is_main:  # after a failed save; a finished draft has moved to its name
                shutil.rmtree(draft, ignore_errors=True)
        # only now: a save that failed has beaten nobody
        self._record = max(self._record, score(figures, self.best))
        return path

    def newest(self) -> Found | None:
        """The newest checkpoint that is valid, None where there is none at all. Collective."""
        found, rejected = newest_in(self.folder, self.ranks)
        self._rejected = set(rejected)
        # the main rank reads what is to be beaten and tells all: they must agree on whether a checkpoint is the best
        others = committed(self.folder, self._rejected) if self.ranks.is_main else []
        record = max((score(one.figures, self.best) for one in others), default=-math.inf)
        self._record = self.ranks.all_gather_values(record)[0]
        return found

    def is_best(self, figures: dict[str, float] | None) -> bool:
        """Are these figures better than those of every checkpoint so far? The same answer on every rank."""
        return score(figures, self.best) > self._record

    def read(self, found: Found, tensors: dict[str, Tensor]) -> None:
        """Fill the given tensors in place, of DTensors the shard this rank holds. Collective.

        Ranks may ask for different ones. CorruptCheckpoint, before any is touched, where one is missing or has another
        shape there.
        """
        from trainer.records.tensor_files import read_into

        together(self.ranks, lambda: read_into(tensors, found.path), CorruptCheckpoint)

    def _begin(self, draft: Path, needed: int) -> None:
        """Main rank: an empty draft, where there is space for what is coming."""
        if self.ranks.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            # before a byte is written: filling the disk up would hurt others, too
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            draft.mkdir()

    def _write(
        self, draft: Path, tensors: dict[str, Tensor], state: dict[str, Any], names: list[str], alone: bool
    ) -> None:
        from trainer.records.tensor_files import write_tensors  # here: what it imports takes longer than first steps

        if self.ranks.is_main or not alone:
            write_tensors(draft, tensors, names, alone)
        if self.ranks.is_main:
            (draft / STATE).write_bytes(encode(state))

    def _seal(self, draft: Path) -> dict[str, dict[str, Any]]:
        """Collective: what really lies there, brought to the disk and hashed; shared out, for reading it takes time."""
        listed = together(self.ranks, lambda: sorted(os.listdir(draft)), FailedSave)[0]
        mine = listed[self.ranks.rank :: self.ranks.size]
        sealed = together(self.ranks, lambda: {name: _sealed(draft / name) for name in mine}, FailedSave)
        return {name: fact for own in sealed for name, fact in own.items()}

    def _commit(self, draft: Path, manifest: Manifest) -> None:
        """Main rank: manifest, then the name, each on the disk before the next; then the surplus goes."""
        if not self.ranks.is_main:
            return
        (draft / MANIFEST).write_bytes(manifest_bytes(manifest))
        sync(draft / MANIFEST)
        sync(draft)
        put_in_place(draft, manifest.path)
        self._rejected.discard(manifest.path)
        # only after the new one stands: never is there a moment with fewer than were asked for
        for path in surplus(committed(self.folder, self._rejected), self.keep, self.best):
            if path != manifest.path:
                discard(path)


def _sealed(path: Path) -> dict[str, Any]:
    """What is to be known of a file, once it is on the disk."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}
