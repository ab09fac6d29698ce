"""Finding a checkpoint: the newest that is valid, every byte of it verified before anybody uses one."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.parallel.ranks import Ranks
from trainer.records.manifest import (
    TENSORS,
    CorruptCheckpoint,
    Manifest,
    check_hashes,
    check_sizes,
    read_manifest,
    read_state,
)
from trainer.records.retention import candidates, folder_name
from trainer.records.safetensors_header import TensorFact, read_tensors
from trainer.records.together import together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every byte was verified (`described`: not yet)."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, TensorFact]
    facts: dict[str, Any]
    figures: dict[str, float]


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
    """Every rank checks names, sizes and headers; the reading for the hashes is shared out."""
    manifest = read_manifest(path)
    check_sizes(manifest)
    check_hashes(manifest, sorted(manifest.files)[rank::ranks])
    return described(manifest)


def described(manifest: Manifest) -> Found:
    """What a checkpoint says about itself: its state, and the headers of its tensors."""
    tensors = read_tensors(manifest.path / name for name in sorted(manifest.files) if name.endswith(TENSORS))
    return Found(manifest.path, manifest.step, read_state(manifest), tensors, manifest.facts, manifest.figures)
