"""Copies of a run's checkpoints elsewhere, as who opens the run's folder sees them; here: none."""

from __future__ import annotations

from pathlib import Path


def name_below(folder: Path, root: Path) -> str:
    """What tells this run from all others that are mirrored to one place: its path in run.root, or its folder's name.

    root: run.root. The runs of a sweep lie in the sweep's folder, and those of two sweeps may have one name.
    """
    root = root.absolute()
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name


class NoCopies:
    """There is no mirror."""

    def is_empty(self) -> bool:
        """Is there no copy, not even half of one? Refusal where nobody can tell."""
        return True

    def refuse_leftovers(self) -> None:
        """Refuse a new run where an earlier one of its name has copies: a later start would take those."""

    def restore_newer(self, folder: Path) -> None:
        """Copy back the newest valid checkpoint, if it is later than those in this folder.

        Refusal if the copies cannot be listed, or if there are some, none is valid, and the folder has none either.
        """
