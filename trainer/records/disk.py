"""What a checkpoint asks of the disk that it lies on: one object, so that another one can stand in its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.safe_files import fsync_path

if TYPE_CHECKING:
    from torch import Tensor


class Disk:
    """The disk as it is. Every method may raise OSError."""

    def free(self, folder: Path) -> int:
        """The bytes that are free there."""
        return shutil.disk_usage(folder).free

    def write(self, path: Path, data: bytes) -> None:
        """A file of these bytes; they need not be on the disk yet."""
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
        """The same of tensors, rows in order, as safetensors."""
        from safetensors.torch import save_file  # here: it takes longer than first steps

        save_file(dict(tensors), path, metadata)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or the names in a folder, are on the disk."""
        fsync_path(path)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file or a folder another name, in one step."""
        os.rename(path, target)
