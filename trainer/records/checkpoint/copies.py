"""Copies of a run's checkpoints elsewhere, as who opens the run's folder sees them; here: none."""

from __future__ import annotations

from pathlib import Path


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
