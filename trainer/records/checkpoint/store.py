"""The checkpoints of a folder: found, verified, kept and deleted.

A crash on the way costs nothing. Names and times of files play no part: the step in the manifest decides.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.messages import FatalRunError, escape_line
from trainer.parallel.ranks import Ranks, all_or_none
from trainer.records.checkpoint.base_weights import base_of
from trainer.records.checkpoint.manifest import (
    FINITE_FACT,
    CheckpointInfo,
    CorruptCheckpoint,
    Headers,
    Manifest,
    TensorShard,
    check_hashes,
    check_sizes,
    read_manifest,
    read_state,
)
from trainer.records.disk import Disk
from trainer.records.metrics_reader import metric_rank, metric_score


class NoUsableCheckpoint(CorruptCheckpoint, FatalRunError):
    """Checkpoints that are all corrupt: the run neither goes on nor starts over by itself."""

    def __init__(self, message: str, reasons: Iterable[str]) -> None:
        """`reasons`: a line each."""
        super().__init__(message)
        self.args = ("\n".join([*self.args, *reasons]),)


# Names that begin with a dot are never read as checkpoints.
DRAFT = ".tmp-"  # being written
TRASH = ".trash-"  # being removed
REPLACED = ".replaced-"  # an older save of the same step, until the new one stands in its place

log = logging.getLogger(__name__)


def list_candidates(folder: Path) -> dict[Path, Manifest | None]:
    """Every folder that offers itself as a checkpoint: those without a readable manifest, then the newest first.

    Whoever takes the first that is valid has then seen all that may be newer.
    """
    manifests: dict[Path, Manifest | None] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.name.startswith(".") and not path.is_file():
            manifests[path] = None  # no checkpoint, but it may have been one: not to be passed over in silence
            with suppress(CorruptCheckpoint):
                manifests[path] = read_manifest(path)
    steps = {path: manifest.step if manifest else math.inf for path, manifest in manifests.items()}
    return {path: manifests[path] for path in sorted(manifests, key=steps.__getitem__, reverse=True)}


def open_newest(
    folder: Path, ranks: Ranks, required_state: Collection[str] = ()
) -> tuple[CheckpointInfo | None, list[Path]]:
    """The newest valid checkpoint of a folder, and the corrupt ones that were passed over. Collective.

    required_state: what state.json must say. None where there is no checkpoint; where all are corrupt that is an error,
    not a fresh start.
    """
    # the main rank's list is everybody's: others may not see yet what was just renamed
    # all ranks; the main one sends the names of the candidates
    names = ranks.broadcast_value([path.name for path in list_candidates(folder)] if ranks.is_main else [])
    problems: dict[Path, str] = {}
    # all ranks try the same one, and give it up together
    for path in (folder / name for name in names):
        try:
            return open_checkpoint(path, ranks, required_state), list(problems)
        except CorruptCheckpoint as error:
            problems[path] = f"  {error}"
            if ranks.is_main:
                log.warning("checkpoint %s is skipped: %s", escape_line(path.name), error)
    if problems:
        raise NoUsableCheckpoint(
            f"none of the {len(problems)} checkpoints in {folder} can be used; run.resume=fresh starts over:",
            list(problems.values())[:15],
        )
    return None, []


def open_checkpoint(path: Path, ranks: Ranks, required_state: Collection[str] = ()) -> CheckpointInfo:
    """Verify one checkpoint, every byte of it. Collective; CorruptCheckpoint in words, on all ranks or none."""
    # here: what this imports takes longer than a first step
    from trainer.records.checkpoint.tensor_files import check_finite, read_headers

    def inspect() -> tuple[Manifest, dict[str, Any]] | None:
        if not ranks.is_main:
            return None
        manifest = read_manifest(path)
        check_sizes(manifest)
        return manifest, read_state(manifest, required_state)

    # the main rank looks for all: each file is asked for once
    manifest, state = ranks.broadcast_value(all_or_none(ranks, inspect, CorruptCheckpoint))  # all ranks; both files

    def verify() -> dict[str, dict[str, TensorShard]]:
        # each rank reads its portion of the files, for that takes time; headers last: they count only where the
        # bytes are what was written
        my_files = sorted(manifest.files)[ranks.rank :: ranks.size]
        check_hashes(manifest, my_files)
        if not manifest.facts.get(FINITE_FACT):
            check_finite(path, my_files)
        return read_headers(path, my_files)

    # all ranks; each sends the headers of its files, so what is wrong with them together is so on all ranks
    headers = ranks.all_gather_values(all_or_none(ranks, verify, CorruptCheckpoint))
    return _make_info(manifest, state, {file: shards for my_files in headers for file, shards in my_files.items()})


def inspect_checkpoint(manifest: Manifest, required_state: Collection[str] = ()) -> CheckpointInfo:
    """What a checkpoint says about itself: its state, and the headers of its tensors."""
    from trainer.records.checkpoint.tensor_files import read_headers

    return _make_info(
        manifest, read_state(manifest, required_state), read_headers(manifest.path, sorted(manifest.files))
    )


def _make_info(manifest: Manifest, state: dict[str, Any], headers: Headers) -> CheckpointInfo:
    from trainer.records.checkpoint.tensor_files import unsharded_tensors

    base = base_of(state)
    tensors = unsharded_tensors(manifest.path, headers) | (base.outline if base else {})
    return CheckpointInfo(**vars(manifest), state=state, tensors=tensors, headers=headers)


def list_complete(folder: Path, rejected: Collection[Path] = ()) -> list[Manifest]:
    """The checkpoints that were written to the end and are still there, the newest first."""
    manifests = []
    for path, manifest in list_candidates(folder).items():
        with suppress(CorruptCheckpoint):
            if manifest and path not in rejected:
                check_sizes(manifest)
                manifests.append(manifest)
    return manifests


def describe_damage(folder: Path) -> list[str]:
    """What is wrong with the checkpoints that are not whole, the newest first."""
    problems = []
    for path in list_candidates(folder):
        try:
            check_sizes(read_manifest(path))
        except CorruptCheckpoint as error:
            problems.append(str(error))
    return problems


def select_surplus(checkpoints: list[Manifest], keep: int, best: str) -> list[Path]:
    """Those that may go, given the newest first: all but the newest `keep` and the best one."""
    best_one = select_best(checkpoints, best)
    return [checkpoint.path for checkpoint in checkpoints[keep:] if checkpoint is not best_one]


def select_best(checkpoints: list[Manifest], best: str) -> Manifest | None:
    """The best of them, of those with equal metrics the newest; None where none has that metric."""
    measured = [checkpoint for checkpoint in checkpoints if metric_score(checkpoint.metrics, best) > -math.inf]
    return max(measured, key=lambda checkpoint: (metric_rank(checkpoint.metrics, best), checkpoint.step), default=None)


def move_into_place(draft: Path, target: Path, disk: Disk) -> None:
    """Give a finished draft its name; what stood there goes."""
    replaced = target.with_name(f"{REPLACED}{target.name}.{secrets.token_hex(4)}")
    # the old one moves aside and is removed last: no moment has neither, and `clean_leftovers` knows it by its name
    if os.path.lexists(target):
        disk.rename(target, replaced)
    disk.rename(draft, target)
    disk.sync(target.parent)
    if os.path.lexists(replaced):
        remove_checkpoint(replaced)


def remove_checkpoint(path: Path) -> None:
    """Remove a folder: renamed first, so that a half-removed one is never taken for a checkpoint."""
    trash = path.with_name(f"{TRASH}{path.name.lstrip('.')}.{secrets.token_hex(4)}")
    os.rename(path, trash)
    _remove_tree(trash)


def clean_leftovers(folder: Path) -> None:
    """Clear what dead attempts left behind; the run's lock must be held, nobody else may be writing here."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        final_path = folder / path.name.removeprefix(REPLACED).split(".")[0]
        # died between the two renames of move_into_place: the old one gets its name back
        if path.name.startswith(REPLACED) and not final_path.exists():
            os.rename(path, final_path)
        elif path.name.startswith((DRAFT, TRASH, REPLACED)):
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """A folder with all that is in it; of a link the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
