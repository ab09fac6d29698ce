"""Fashion-MNIST: 70,000 grey pictures of clothes, 28×28 pixels, in ten classes."""

from __future__ import annotations

import fcntl
import os
import socket
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from recipes.vision.idx import read_idx
from recipes.vision.images import Images
from trainer.data.data import Data
from trainer.data.transforms import Augment, Random
from trainer.refusal import Refusal

_FILES = {part: (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")}
_NAMES = [name for pair in _FILES.values() for name in pair]
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_PATIENCE = 5.0  # seconds for a silent server


class FashionMNIST(Data):
    """Fashion-MNIST (1, 28, 28) from its four files: in `root`, else from Debian's package, else downloaded once."""

    def __init__(self, augment: Augment, root: str | None = None) -> None:
        self.folder = Path(root).expanduser() if root else _find()
        self._augment = augment
        missing = [name for name in _NAMES if not (self.folder / name).is_file()]
        if missing:
            raise Refusal(f"{self.folder} lacks {', '.join(missing)}; Fashion-MNIST is {_four()} in one folder")

    def train(self) -> Images:
        """The 60,000 training images."""
        return self._train

    def evaluation(self) -> Images:
        """The 10,000 test images."""
        return self._test

    def augment(self, inputs: Tensor, targets: Tensor, random: Random, training: bool) -> tuple[Any, Any]:
        """Small changes of the images while training; normalisation always."""
        return self._augment(inputs, random, training), targets

    @cached_property
    def _train(self) -> Images:
        return _read(self.folder, "train")

    @cached_property
    def _test(self) -> Images:
        return _read(self.folder, "t10k")


def _read(folder: Path, part: str) -> Images:
    image_file, label_file = (folder / name for name in _FILES[part])
    images, labels = read_idx(image_file, 28, 28), read_idx(label_file)
    if len(images) != len(labels):
        raise Refusal(
            f"{image_file} holds {len(images)} images, but {label_file} {len(labels)} labels; expected as many"
        )
    if len(labels) and labels.max() > 9:
        raise Refusal(f"{label_file} holds the label {int(labels.max())}; expected 0..9")
    return Images(images[:, None], labels.long())


def _find() -> Path:
    """The folder with the four files: Debian's, or the cache, filled by the first process that comes."""
    if all((_DEBIAN / name).is_file() for name in _NAMES):
        return _DEBIAN
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"
    folder = cache / "FashionMNIST" / "raw"  # where torchvision puts them under its root
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process releases it
            if not all((folder / name).is_file() for name in _NAMES):
                _download(cache)
    except (OSError, RuntimeError) as error:
        raise Refusal(
            f"Fashion-MNIST is not on this machine and cannot be downloaded ({_last_line(error)}): put {_four()} into "
            f"one folder and say data.root=FOLDER, or install Debian's package dataset-fashion-mnist"
        ) from error
    return folder


def _download(cache: Path) -> None:
    from torchvision.datasets import FashionMNIST as Source  # here, because the import takes seconds

    usual = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        Source(str(cache), train=True, download=True)
    finally:
        socket.setdefaulttimeout(usual)


def _four() -> str:
    return ", ".join(_NAMES[:-1]) + " and " + _NAMES[-1]


def _last_line(error: BaseException) -> str:
    """The reason itself: torchvision's message lists the mirrors first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
