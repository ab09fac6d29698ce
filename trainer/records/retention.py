"""Which checkpoints stay, and how one goes so that a crash on the way costs nothing."""

import math
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from trainer.launch.durable import sync
from trainer.records.manifest import CorruptCheckpoint, Manifest, check_sizes, read_manifest

# Names that begin with a dot are never read as checkpoints.
DRAFT = ".tmp-"  # being written
TRASH = ".trash-"  # being removed
REPLACED = ".replaced-"  # an older save of the same step, until the new one stands in its place


def candidates(folder: Path) -> list[Path]:
    """Every folder that offers itself as a checkpoint, whether it is one or not."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_file())


def committed(folder: Path, rejected: Collection[Path] = ()) -> list[Manifest]:
    """The checkpoints that were written to the end, oldest step first; file times and names play no part."""
    found = []
    for path in candidates(folder):
        try:
            manifest = read_manifest(path)
            check_sizes(manifest)
        except (CorruptCheckpoint, OSError):
            continue
        if path not in rejected:
            found.append(manifest)
    return sorted(found, key=lambda manifest: (manifest.step, manifest.path.name == folder_name(manifest.step)))


def surplus(checkpoints: list[Manifest], keep: int, best: str) -> list[Path]:
    """Those that may go: all but the newest `keep` and the best one. The newest never goes."""
    staying = {manifest.path for manifest in checkpoints[-max(keep, 1) :]}
    winner = best_of(checkpoints, best)
    return [one.path for one in checkpoints if one.path not in staying and one is not winner]


def best_of(checkpoints: list[Manifest], best: str) -> Manifest | None:
    """The one with the best figure, the earliest among equals; None where none has that figure."""
    ranked = [one for one in checkpoints if score(one.figures, best) > -math.inf]
    return max(ranked, key=lambda one: score(one.figures, best), default=None)


def score(figures: dict[str, float] | None, best: str) -> float:
    """Larger is better: "accuracy" as it is, "-loss" negated; minus infinity where it is missing or not a number."""
    value = (figures or {}).get(best.removeprefix("-"), math.nan)
    value = -value if best.startswith("-") else value
    return -math.inf if math.isnan(value) else value


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint; the digits are for people, the manifest decides."""
    return f"step-{step:08d}"


def put_in_place(draft: Path, target: Path) -> None:
    """Give a finished draft its name. What stood there moves aside first, so that no moment has neither."""
    aside = target.with_name(f"{REPLACED}{target.name}.{secrets.token_hex(4)}")
    if target.exists():
        os.rename(target, aside)
    os.rename(draft, target)
    sync(target.parent)
    if aside.exists():
        discard(aside)


def discard(path: Path) -> None:
    """Remove a folder: renamed first, so that a half-removed one is never taken for a checkpoint."""
    trash = path.with_name(f"{TRASH}{path.name.lstrip('.')}.{secrets.token_hex(4)}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear what dead attempts left behind; the run's lock must be held, nobody else may be writing here."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(REPLACED):
            original = folder / path.name.removeprefix(REPLACED).split(".")[0]
            if not original.exists():  # died between the two renames of put_in_place
                os.rename(path, original)
                continue
        if path.name.startswith((DRAFT, TRASH, REPLACED)):
            shutil.rmtree(path, ignore_errors=True)
