"""Checkpoints: a folder of tensors and facts that is written whole or not at all, and verified before it is used.

Tensors go to safetensors files under their own names, sharded ones in parallel; everything else to JSON. Any number of
processes reads what any other number wrote.
"""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.launch.durable import sync_file, sync_folder
from trainer.parallel.ranks import Ranks
from trainer.records.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    CorruptCheckpoint,
    FileFact,
    Manifest,
    check_digests,
    check_names,
    encode,
    read_manifest,
    read_state,
    sha256_of,
    write_manifest,
)
from trainer.records.retention import (
    DRAFT,
    candidates,
    committed,
    discard,
    folder_name,
    put_in_place,
    score,
    surplus,
    sweep,
)
from trainer.records.safetensors_header import TensorFact, read_tensors
from trainer.records.tensor_files import misfits, read_into, write_tensors
from trainer.records.together import together

MARGIN = 2**20  # bytes of a checkpoint beside its tensors: headers and JSON

log = logging.getLogger(__name__)


class FailedSave(Exception):
    """A checkpoint could not be written; the older ones are as they were."""


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every byte was verified (`described`: not yet)."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, TensorFact]
    facts: dict[str, Any]
    figures: dict[str, float]


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
        held = self._together(step, tensors, lambda: _sizes(tensors))  # on each rank: name → bytes
        whole = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        alone = whole and all(one.keys() == held[0].keys() for one in held)
        sizes = {name: size for one in held for name, size in one.items()}
        draft = self.folder / self._together(step, tensors, lambda: self._begin(step, sum(sizes.values())))[0]
        try:
            self._together(step, tensors, lambda: self._write(draft, tensors, state, list(sizes), alone))
            listed = self._together(step, tensors, lambda: sorted(os.listdir(draft)))[0]
            mine = listed[self.ranks.rank :: self.ranks.size]
            parts = self._together(step, tensors, lambda: {name: _sealed(draft / name) for name in mine})
            files = {name: FileFact(*fact) for part in parts for name, fact in part.items()}
            said = Manifest(self.folder / folder_name(step), step, self.facts, figures or {}, files)
            self._together(step, tensors, lambda: self._commit(draft, said))
        finally:
            if self.ranks.is_main:
                shutil.rmtree(draft, ignore_errors=True)
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
        """Fill the given tensors in place, of DTensors the part this rank holds. Collective.

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
        if self.ranks.is_main or not alone:
            write_tensors(draft, tensors, names, alone)
        if self.ranks.is_main:
            (draft / STATE).write_bytes(encode(state))

    def _commit(self, draft: Path, manifest: Manifest) -> None:
        """Main rank: manifest, then the name, each on the disk before the next; then the surplus goes."""
        if not self.ranks.is_main:
            return
        (draft / MANIFEST).write_bytes(write_manifest(manifest))
        sync_file(draft / MANIFEST)
        sync_folder(draft)
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


def newest_in(folder: Path, ranks: Ranks) -> tuple[Found | None, list[Path]]:
    """The newest valid checkpoint of a folder, and the corrupt ones that were passed over. Collective."""
    order = together(ranks, lambda: newest_first(folder) if ranks.is_main else [], CorruptCheckpoint)[0]
    rejected: list[str] = []
    for name in order:
        try:
            return open_checkpoint(folder / name, ranks), [folder / name for name in order[: len(rejected)]]
        except CorruptCheckpoint as error:
            rejected.append(str(error))
            if ranks.is_main:
                log.warning("checkpoint %s is passed over: %s", name, error)
    if rejected:
        reasons = "\n".join(f"  {reason}" for reason in rejected[:15])
        raise CorruptCheckpoint(f"none of the {len(rejected)} checkpoints in {folder} can be used:\n{reasons}")
    return None, []


def open_checkpoint(path: Path, ranks: Ranks | None = None) -> Found:
    """Verify one checkpoint, every byte of it. Collective; CorruptCheckpoint in words, on all ranks or none."""
    ranks = ranks or Ranks()
    found: list[Found] = []
    together(ranks, lambda: found.append(_verified(path, ranks.rank, ranks.size)), CorruptCheckpoint)
    return found[0]


def _fill(tensors: dict[str, Tensor], found: Found, asked: set[str]) -> None:
    problems = misfits(found.tensors, tensors, asked)
    if problems:
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CorruptCheckpoint(f"{found.path} does not fit this network:\n  " + "\n  ".join(problems[:10]) + more)
    read_into(tensors, found.path)


def newest_first(folder: Path) -> list[str]:
    """Names of the candidates by the step in their manifest; those without a readable one first, to be reported."""
    steps = {path: manifest.step if (manifest := _manifest(path)) else 10**18 for path in candidates(folder)}
    order = sorted(steps, key=lambda path: (steps[path], path.name == folder_name(steps[path])), reverse=True)
    return [path.name for path in order]


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (CorruptCheckpoint, OSError):
        return None


def _verified(path: Path, rank: int, ranks: int) -> Found:
    """Every rank checks names, sizes and headers; the reading for the digests is shared out."""
    manifest = read_manifest(path)
    check_names(manifest)
    check_digests(manifest, sorted(manifest.files)[rank::ranks])
    return described(manifest)


def described(manifest: Manifest) -> Found:
    """What a checkpoint says about itself: its state, and the headers of its tensors."""
    tensors = read_tensors(manifest.path / name for name in sorted(manifest.files) if name.endswith(TENSORS))
    return Found(manifest.path, manifest.step, read_state(manifest), tensors, manifest.facts, manifest.figures)


def _sealed(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file that is on the disk."""
    sync_file(path)
    return path.stat().st_size, sha256_of(path)


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each tensor, over all ranks that hold a part of it."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
