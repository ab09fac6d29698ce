"""Frozen weights that a checkpoint does not hold, because they lie elsewhere: where, and which.

They are what `init_from` gave, and nothing has trained them. So a checkpoint of adapters has megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.messages import Refusal
from trainer.records.checkpoint.manifest import file_sha256

BASE_KEY = "base"  # of state.json


@dataclass(frozen=True)
class BaseWeights:
    """The files that hold them, and the names that they have in the network."""

    path: Path  # what init_from named: a folder, or a file
    files: Mapping[str, str]  # in that folder, or the file itself: name → sha256
    shapes: Mapping[str, Sequence[int]]  # by the network's names

    @classmethod
    def hashed(cls, path: Path, files: Iterable[Path], shapes: Mapping[str, Sequence[int]]) -> BaseWeights:
        """Those of these files, which are read for it."""
        files = list(files)
        with ThreadPoolExecutor() as threads:  # hashing lets go of Python's lock
            hashes = list(threads.map(file_sha256, files))
        return cls(path.absolute(), {file.name: each for file, each in zip(files, hashes, strict=True)}, shapes)

    @property
    def fields(self) -> dict[str, Any]:
        """As state.json has it."""
        shapes = {name: [*shape] for name, shape in self.shapes.items()}
        return {"path": str(self.path), "files": dict(self.files), "tensors": shapes}

    @property
    def outline(self) -> dict[str, Tensor]:
        """The tensors without values."""
        return {name: torch.empty(tuple(shape), device="meta") for name, shape in self.shapes.items()}

    def check(self, path: Path, files: Iterable[Path]) -> None:
        """Refusal where these files, of a folder or a file that lies there now, are not the same to the bit."""
        try:
            hashes = BaseWeights.hashed(path, files, {}).files
        except OSError as error:
            raise Refusal(f"{error.filename}: {error.strerror}") from error
        # the name of a single file may be another one
        alone = len(self.files) == len(hashes) == 1 and [*self.files.values()] == [*hashes.values()]
        for name, sha256 in self.files.items() if not alone else ():
            if hashes.get(name) != sha256:
                what = "is not among them" if name not in hashes else "has another SHA-256"
                raise Refusal(
                    f"{path / name if path.is_dir() else path}: not the weights that it began with: {name} {what}"
                )


def base_of(state: Mapping[str, Any]) -> BaseWeights | None:
    """What a state.json says; None: the checkpoint holds all of its tensors."""
    if (fields := state.get(BASE_KEY)) is None:
        return None
    return BaseWeights(Path(fields["path"]), fields["files"], fields["tensors"])
