"""Checkpoints: a folder of tensors and facts that is written whole or not at all, and verified before it is used.

Tensors go to safetensors files under their own names, sharded ones in parallel; everything else to JSON. Any number of
processes reads what any other number wrote.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.launch.durable import sync
from trainer.parallel.ranks import Ranks
from trainer.records.found import Found, newest_in
from trainer.records.manifest import (
    MANIFEST,
    STATE,
    CorruptCheckpoint,
    FileFact,
    Manifest,
    encode,
    sha256_of,
    write_manifest,
)
from trainer.records.retention import (
    DRAFT,
    committed,
    discard,
    folder_name,
    put_in_place,
    score,
    surplus,
    sweep,
)
from trainer.records.together import together

MARGIN = 2**20  # bytes of a checkpoint beside its tensors: headers and JSON


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
        self._record = score(None, best)
        if ranks.is_main:
            sweep(folder)

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        figures: dict[str, float] | None = None,
    ) -> Path:
        """Write one checkpoint; it has its name once it is whole. Collective; FailedSave on all ranks or none.

        tensors: what this rank holds. Those that are whole are equal on every rank that has them; not all ranks need
        have the same.
        """
        # what there is over all ranks: for the space on the disk, and to see whether one process can write everything
        held = self._together(step, tensors, lambda: _sizes(tensors))  # on each rank: name → bytes
        whole = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        alone = whole and all(one.keys() == held[0].keys() for one in held)
        sizes = {name: size for one in held for name, size in one.items()}
        # a folder without a name that counts: a crash from here to the commit leaves the older checkpoints as they were
        draft = self.folder / self._together(step, tensors, lambda: self._begin(step, sum(sizes.values())))[0]
        try:
            self._together(step, tensors, lambda: self._write(draft, tensors, state, list(sizes), alone))
            # what really lies there is listed, brought to the disk and hashed; shared out, for reading it takes time
            listed = self._together(step, tensors, lambda: sorted(os.listdir(draft)))[0]
            mine = listed[self.ranks.rank :: self.ranks.size]
            sealed = self._together(step, tensors, lambda: {name: _sealed(draft / name) for name in mine})
            files = {name: FileFact(*fact) for own in sealed for name, fact in own.items()}
            # the manifest last, then the name: who sees the name sees a checkpoint that is whole and on the disk
            said = Manifest(self.folder / folder_name(step), step, self.facts, figures or {}, files)
            self._together(step, tensors, lambda: self._commit(draft, said))
        finally:
            if self.ranks.is_main:  # after a failed save; a finished draft has moved to its name
                shutil.rmtree(draft, ignore_errors=True)
        # only now: a save that failed has beaten nobody
        self._record = max(self._record, score(figures, self.best))
        return said.path

    def newest(self) -> Found | None:
        """The newest checkpoint that is valid, None where there is none at all. Collective.

        A corrupt one is passed over with a warning; where all are corrupt that is an error, not a fresh start.
        """
        found, rejected = newest_in(self.folder, self.ranks)
        self._rejected = set(rejected)
        figures = [one.figures for one in committed(self.folder, self._rejected)] if self.ranks.is_main else []
        self._record = self.ranks.all_gather_values(
            max((score(one, self.best) for one in figures), default=self._record)
        )[0]
        return found

    def is_best(self, figures: dict[str, float] | None) -> bool:
        """Are these figures better than those of every checkpoint so far? The same answer on every rank."""
        return figures is not None and score(figures, self.best) > self._record

    def read(self, found: Found, tensors: dict[str, Tensor]) -> None:
        """Fill the given tensors in place, of DTensors the shard this rank holds. Collective.

        Ranks may ask for different ones; CorruptCheckpoint where one is missing, or where nobody asked for a network's.
        """
        asked = {name for names in self.ranks.all_gather_values(sorted(tensors)) for name in names}
        together(self.ranks, lambda: _fill(tensors, found, asked), CorruptCheckpoint)

    def _begin(self, step: int, needed: int) -> str:
        if not self.ranks.is_main:
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.folder).free < needed + MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        name = f"{DRAFT}step-{step}-{secrets.token_hex(4)}"
        (self.folder / name).mkdir()
        return name

    def _write(
        self, draft: Path, tensors: dict[str, Tensor], state: dict[str, Any], names: list[str], alone: bool
    ) -> None:
        from trainer.records.tensor_files import write_tensors  # here: what it imports takes longer than first steps

        if self.ranks.is_main or not alone:
            write_tensors(draft, tensors, names, alone)
        if self.ranks.is_main:
            (draft / STATE).write_bytes(encode(state))

    def _commit(self, draft: Path, manifest: Manifest) -> None:
        """Main rank: manifest, then the name, each on the disk before the next; then the surplus goes."""
        if not self.ranks.is_main:
            return
        (draft / MANIFEST).write_bytes(write_manifest(manifest))
        sync(draft / MANIFEST)
        sync(draft)
        put_in_place(draft, manifest.path)
        self._rejected.discard(manifest.path)
        for path in surplus(committed(self.folder, self._rejected), self.keep, self.best):
            if path != manifest.path:
                discard(path)

    def _together(self, step: int, tensors: dict[str, Tensor], action: Callable[[], Any]) -> list[Any]:
        try:
            return together(self.ranks, action, FailedSave)
        except FailedSave as error:
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            needed = sum(_sizes(tensors).values()) + MARGIN
            raise FailedSave(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. It needs about "
                f"{needed:,} bytes, {free:,} are free there; the older checkpoints are intact"
            ) from error


def _fill(tensors: dict[str, Tensor], found: Found, asked: set[str]) -> None:
    from trainer.records.tensor_files import misfits, read_into

    problems = misfits(found.tensors, tensors, asked)
    if problems:
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CorruptCheckpoint(f"{found.path} does not fit this network:\n  " + "\n  ".join(problems[:10]) + more)
    read_into(tensors, found.path)


def _sealed(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file that is on the disk."""
    sync(path)
    return path.stat().st_size, sha256_of(path)


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each tensor, over all ranks that hold a shard of it."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
