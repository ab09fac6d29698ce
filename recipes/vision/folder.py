"""Folders of pictures: a folder for each class, as ImageNet's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy
import torch

from recipes.vision.augment import Augment
from recipes.vision.decode import ENDINGS, Windows
from recipes.vision.decoded import DecodedPictures
from trainer.messages import Refusal, escape_line, expand_home

_SHOWN = 5  # names of classes in a line
_SIZES = 64  # files that are asked for their size: each is a request to a file server
_PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")  # what people call parts of a set
_EVALUATION = ("val", "validation", "valid", "test")

Files = list[tuple[int, str]]  # class numbers, paths


class ImageFolder(DecodedPictures):
    """Pictures of `root/train/CLASS/` and `root/val/CLASS/`, or of `root/CLASS/`.

    Without a folder `val`, `held_out` of each class's pictures are the evaluation set.
    """

    def __init__(
        self,
        augment: Augment,
        window: Windows,
        root: str,
        image_size: int,
        channels: Literal[1, 3] = 3,
        num_classes: int | None = None,
        held_out: float = 0.1,
        on_bad: Literal["raise", "skip"] = "raise",
        bad_budget: float = 0.05,
        repeat: int = 1,
        balance: float = 0.0,
        eval_image_size: int | None = None,
    ) -> None:
        super().__init__(augment, window, image_size, eval_image_size, channels, on_bad, bad_budget, repeat, balance)
        if not 0 <= held_out < 1:
            raise Refusal(f"data.held_out is {held_out}; it is a fraction of the images, 0 or more and below 1")
        self._held_out = held_out
        # where what lies; the classes are looked for when a network must know them, the files when they are read
        self._root = place = expand_home(root)
        self._train = place / "train" if (place / "train").is_dir() else place
        found = [place / name for name in _EVALUATION if (place / name).is_dir()]
        self._val = found[0] if found and self._train != place else None
        # new pictures are looked at without the old ones: then nothing of the root need be there
        self.num_classes = len(self.class_names) if num_classes is None else num_classes

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """The names of the classes' folders, in order."""
        return _classes(self._train)

    def evaluation(self) -> Any:
        """The pictures of `val`, or those held out; None where there are none."""
        return super().evaluation() if False in self._paths else None

    def notes(self) -> list[str]:
        """Which classes there are, and where the evaluation set comes from if there is no folder for it."""
        more = ", …" if len(self.class_names) > _SHOWN else ""
        names = ", ".join(map(escape_line, self.class_names[:_SHOWN])) + more
        held_out = f"; no folder val, so data.held_out={self._held_out:g} of each is for evaluation"
        return [f"classes {names}{held_out if self._val is None else ''}"]

    @cached_property
    def _paths(self) -> dict[bool, Paths]:
        """The files of the training set, and of the evaluation set if there is one."""
        if self.num_classes < len(self.class_names):
            raise Refusal(
                f"data.num_classes={self.num_classes}, but {self._train} has {len(self.class_names)} folders of classes"
            )
        files = _listed(self._train, self.class_names)
        if self._val is None:
            split = _held_out(files, self._held_out)
        else:
            strange = set(_classes(self._val)) - set(self.class_names)
            if strange:
                names = ", ".join(map(escape_line, sorted(strange)[:5]))
                raise Refusal(f"{self._val} has classes that {self._train} has not: {names}")
            split = {True: files, False: _listed(self._val, self.class_names)}
        return {training: Paths(part, self._root) for training, part in split.items() if part}

    def _sources(self, training: bool) -> Paths:
        return self._paths[training]


class Paths:
    """The files of pictures below a folder, and their labels."""

    def __init__(self, files: Files, root: Path) -> None:
        labels, paths = zip(*files, strict=True)
        self.labels = torch.tensor(labels)  # (N,)
        # one array: of a list every worker would in time hold a copy, as looking at an object writes to its memory
        self._paths, self._root = numpy.array([os.fsencode(path) for path in paths]), root

    def source(self, at: int) -> str:
        """The path."""
        return self.name(at)

    def name(self, at: int) -> str:
        """The path."""
        return os.fsdecode(bytes(self._paths[at]))

    def fingerprint(self) -> str:
        """From all names below the folder, classes among them, and the sizes of some files."""
        size, above = len(self._paths), len(os.fsencode(self._root))
        found = sha256(b"\n".join(path[above:] for path in self._paths.tolist()))
        for at in range(0, size, -(-size // _SIZES)):
            with suppress(OSError):  # a link to nothing, which decoding will meet
                found.update(str(os.path.getsize(self._paths[at])).encode())
        return found.hexdigest()[:16]


def _classes(folder: Path) -> list[str]:
    """The names of the classes' folders, in order: a class's number is its place."""
    try:
        found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise Refusal(f"data.root: {folder} cannot be read ({error.strerror}); {_wanted()}") from error
    if not found:
        raise Refusal(f"data.root: {folder} has no folders of classes; {_wanted()}")
    parts = [name for name in found if name.lower() in _PARTS]
    if len(parts) > 1 or parts == found:  # one of several folders may be a class
        raise Refusal(f"data.root: {folder} has {' and '.join(parts)}: parts of a data set, no classes; {_wanted()}")
    return found


def _wanted() -> str:
    return "expected ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, or ROOT/CLASS/*.jpg"


def _listed(folder: Path, classes: Sequence[str]) -> Files:
    """The pictures of each class, those in its subfolders too, sorted. Refusal where a class has none."""
    files: Files = []
    for number, name in enumerate(classes):
        pictures = [(number, path) for path in sorted(_below(folder / name)) if path.lower().endswith(ENDINGS)]
        if not pictures:
            what = "has no pictures" if (folder / name).is_dir() else "is not there: a class of the training pictures"
            raise Refusal(f"{escape_line(folder / name)} {what}; expected files ending in {' '.join(ENDINGS)}")
        files += pictures
    return files


def _below(folder: Path) -> Iterator[str]:
    """The files in a folder and in its subfolders. Hidden ones are left out: macOS, Jupyter make copies of pictures.

    Links are followed. Refusal where one leads in a circle: the pictures of other classes would come with it.
    """
    seen: set[str] = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        # by another way it has been here: two links may lead to one folder
        if (place := os.path.realpath(at)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for path in (os.path.join(at, name) for name in folders):
            if os.path.islink(path) and Path(place).is_relative_to(goal := os.path.realpath(path)):
                raise Refusal(
                    f"{escape_line(path)} is a link to {escape_line(goal)}, a folder that it lies in: remove the link"
                )
        yield from (os.path.join(at, name) for name in names if name[0] != ".")


def _held_out(files: Files, part: float) -> dict[bool, Files]:
    """The same files in two: of each class this part goes to the evaluation.

    Those whose names have the smallest hashes: the same ones wherever the folder lies, and mostly the same ones when
    pictures are added.
    """
    split: dict[bool, Files] = {True: [], False: []}
    for _, group in groupby(files, key=lambda file: file[0]):
        own = list(group)
        # one at least, and not the last one
        count = min(max(round(part * len(own)), 1), len(own) - 1) if part else 0
        ranked = sorted(own, key=lambda file: (crc32(os.fsencode(os.path.basename(file[1]))), file[1]))
        chosen = set(ranked[:count])
        split[False] += [file for file in own if file in chosen]
        split[True] += [file for file in own if file not in chosen]
    return split
