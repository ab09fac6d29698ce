"""CIFAR-10 and CIFAR-100: 60,000 colour pictures of 32×32 pixels, in 10 or in 100 classes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from recipes.vision.augment import Augment, Random, resized
from recipes.vision.cached import cached
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures
from recipes.vision.plain_pickle import read_plain
from recipes.vision.prepared import preparation
from trainer.data.data import Preparation
from trainer.messages import Refusal, expand_home

_SIDE = 32
_MOST = 256  # classes: the binary release has a byte for them
_PIXELS = 3 * _SIDE * _SIDE  # bytes of a picture: red, green and blue, each row after row
_LARGEST = 1 << 30  # bytes of a file that is read, for all of it is in memory then; the published ones have a seventh


@dataclass(frozen=True)
class Release:
    """One form in which a set is published: a folder of files."""

    folder: str
    training: Mapping[str, str]  # file → its published md5; empty where none was published
    evaluation: Mapping[str, str]
    names: str  # a file beside them with the names of the classes, which a run can do without

    @property
    def files(self) -> list[Path]:
        """All of them, as they lie in a root."""
        return [Path(self.folder, name) for name in (*self.training, *self.evaluation)]

    def read(self, path: Path) -> tuple[Tensor, Tensor]:
        """The pictures (N, 3072) uint8 and the labels (N,) int64 of one file."""
        raise NotImplementedError

    def read_names(self, path: Path) -> list[str]:
        """The names of the classes, in the order of their numbers."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pickled(Release):
    """The release for Python: pickles of a dict with an array `data` (N, 3072) and a list of labels."""

    key: str  # of the labels

    def read(self, path: Path) -> tuple[Tensor, Tensor]:
        """The pictures and labels of one pickle."""
        named = _named(path)
        pixels, labels = named.get("data"), named.get(self.key)
        if not isinstance(pixels, Tensor) or pixels.shape[1:] != (_PIXELS,) or not isinstance(labels, list):
            raise Refusal(f"{path}: expected a dict of an array `data`, N × {_PIXELS} bytes, and a list `{self.key}`")
        if not all(type(label) is int and 0 <= label < _MOST for label in labels):
            raise Refusal(f"{path}: `{self.key}` holds more than whole numbers from 0 to {_MOST - 1}")
        return pixels, torch.tensor(labels, dtype=torch.int64)

    def read_names(self, path: Path) -> list[str]:
        """The list `label_names`, or `fine_label_names`."""
        names = _named(path).get(f"{self.key.removesuffix('s')}_names", [])
        return [_text(name) for name in names] if isinstance(names, list) else []


@dataclass(frozen=True)
class Binary(Release):
    """The binary release: records of some bytes of labels, the last of which counts, and a picture."""

    labels: int  # bytes of them

    def read(self, path: Path) -> tuple[Tensor, Tensor]:
        """The pictures and labels of one file of records."""
        # a bytearray, because a tensor may be written to and bytes may not
        content, record = bytearray(path.read_bytes()), self.labels + _PIXELS
        if len(content) % record or not content:
            raise Refusal(f"{path} holds {len(content)} bytes; expected a multiple of {record}, the size of a record")
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record)
        return records[:, self.labels :], records[:, self.labels - 1].long()

    def read_names(self, path: Path) -> list[str]:
        """A name a line."""
        return path.read_text(encoding="utf-8").split()


def _named(path: Path) -> dict[Any, Any]:
    """The dict that a pickle holds, its keys as text; an empty one where it holds something else."""
    content = read_plain(path)
    return {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _text(word: Any) -> Any:
    """Text of Python 2 is bytes; a file that was written anew by Python 3 has text."""
    return word.decode("latin-1") if isinstance(word, bytes) else word


class CIFAR10(Pictures):
    """CIFAR-10 (3, 32, 32) from its files: in `root`, else downloaded once. In memory, as bytes."""

    name, archive, num_classes = "CIFAR-10", "cifar-10-python.tar.gz", 10
    stored = (3, _SIDE)
    releases: ClassVar[tuple[Release, ...]] = (
        Pickled(
            "cifar-10-batches-py",
            {
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            {"test_batch": "40351d587109b95175f43aff81a1287e"},
            names="batches.meta",
            key="labels",
        ),
        Binary(
            "cifar-10-batches-bin",
            {f"data_batch_{number}.bin": "" for number in range(1, 6)},
            {"test_batch.bin": ""},
            names="batches.meta.txt",
            labels=1,
        ),
    )

    def __init__(
        self, augment: Augment, root: str | None = None, image_size: int = _SIDE, repeat: int = 1, balance: float = 0.0
    ) -> None:
        super().__init__(augment, repeat, balance)
        if image_size < 1:
            raise Refusal(f"data.image_size is {image_size}; it is a number of pixels, 1 or more")
        self.image_size = image_size
        self._others: list[Path] = []  # files that are not the published ones
        if root is None:
            self._place = cached(self.name, self.releases[0].files, self._download, self._remedy())
        else:
            self._place = expand_home(root)
        self._release = self._found()
        missing = [str(file) for file in self._release.files if not (self._place / file).is_file()]
        if missing:
            raise Refusal(f"{self._place} lacks {', '.join(missing)}: unpack the archive of {self.name} anew")
        names = self._place / self._release.folder / self._release.names
        self.class_names = self._release.read_names(names) if names.is_file() else ()

    def augment(self, inputs: Tensor, targets: Tensor, random: Random, training: bool) -> tuple[Any, Any]:
        """Small changes while training; normalisation always, and the size that the network shall see."""
        images, targets = super().augment(inputs, targets, random, training)
        return resized(images, self.image_size), targets

    def preparation(self) -> Preparation | None:
        """Whole pictures; of another size without whole numbers in between, as the set's own."""
        mean, std = self._augment.mean, self._augment.std
        return preparation(self.image_size, 3, mean, std, between=torch.nn.Identity())

    def notes(self) -> list[str]:
        """Which files are not the published ones."""
        return [f"{file} is not the published file: its md5 is another one" for file in self._others]

    def _found(self) -> Release:
        """The first release that is there."""
        folders = [release.folder for release in self.releases]
        found = [release for release in self.releases if (self._place / release.folder).is_dir()]
        if not found:
            above = f"use the folder above it: data.root={self._place.absolute().parent}"
            remedy = above if self._place.name in folders else self._remedy()
            raise Refusal(f"{self._place} holds no folder {' or '.join(folders)}; {remedy}")
        return found[0]

    def _remedy(self) -> str:
        return (
            f"unpack {self.archive} (https://www.cs.toronto.edu/~kriz/{self.archive}) in a FOLDER, so that there is"
            f" FOLDER/{self.releases[0].folder}, and say data.root=FOLDER"
        )

    def _read(self, training: bool) -> Images:
        """All files of a part, one after the other."""
        files = self._release.training if training else self._release.evaluation
        parts = [self._checked(self._place / self._release.folder / name, md5) for name, md5 in files.items()]
        pixels, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return Images(pixels.view(-1, 3, _SIDE, _SIDE), labels)

    def _checked(self, file: Path, md5: str) -> tuple[Tensor, Tensor]:
        """What one file holds. A note where it is not the published one; Refusal where it is none of this set."""
        if (size := file.stat().st_size) > _LARGEST:
            raise Refusal(f"{file} has {size:,} bytes; a file of {self.name} is read up to {_LARGEST:,}")
        pixels, labels = self._release.read(file)
        if len(pixels) != len(labels):
            raise Refusal(f"{file} holds {len(pixels)} pictures, but {len(labels)} labels; expected as many")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            found, most = f"{int(labels.min())}..{int(labels.max())}", self.num_classes - 1
            raise Refusal(f"{file} holds labels {found}; expected 0..{most}")
        if md5 and hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() != md5:
            self._others.append(file)
        return pixels, labels

    @classmethod
    def _download(cls, cache: Path) -> None:
        from torchvision import datasets  # here, because the import takes seconds

        # the pickles; the other release is for those who have it
        getattr(datasets, cls.__name__)(str(cache), download=True)


class CIFAR100(CIFAR10):
    """CIFAR-100 (3, 32, 32), its 100 fine labels, from its files: in `root`, else downloaded once."""

    name, archive, num_classes = "CIFAR-100", "cifar-100-python.tar.gz", 100
    releases: ClassVar[tuple[Release, ...]] = (
        Pickled(
            "cifar-100-python",
            {"train": "16019d7e3df5f24257cddd939b257f8d"},
            {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
            names="meta",
            key="fine_labels",
        ),
        Binary(  # a coarse and a fine label
            "cifar-100-binary", {"train.bin": ""}, {"test.bin": ""}, names="fine_label_names.txt", labels=2
        ),
    )
