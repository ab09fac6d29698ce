"""Folders of pictures: a folder for each class, as ImageNet's."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from recipes.vision.augment import Augment
from recipes.vision.decode import Windows
from recipes.vision.decoded import DecodedPictures
from recipes.vision.listing import Listing, describe_others, list_pictures
from trainer.messages import Refusal, escape_line, expand_home

_SHOWN = 5  # names of classes in a line
_SIZES = 64  # files that are asked for their size: each is a request to a file server
_PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")  # what people call parts of a set
_EVALUATION = ("val", "validation", "valid", "test")


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
        image_sizes: list[list[int]] | None = None,
        allow_empty: bool = False,
    ) -> None:
        """allow_empty: may the folder `val` be without pictures of some classes?"""
        super().__init__(
            augment, window, image_size, eval_image_size, channels, on_bad, bad_budget, repeat, balance, image_sizes
        )
        if not 0 <= held_out < 1:
            raise Refusal(f"data.held_out is {held_out}; it is a fraction of the images, 0 or more and below 1")
        self._held_out, self._allow_empty = held_out, allow_empty
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
        left_out = (
            [f"{others} left out: no pictures by their names"] if (others := describe_others(self._listings)) else []
        )
        return [f"classes {names}{held_out if self._val is None else ''}", *left_out]

    @cached_property
    def _paths(self) -> dict[bool, Paths]:
        """The files of the training set, and of the evaluation set if there is one."""
        if self.num_classes < len(self.class_names):
            raise Refusal(
                f"data.num_classes={self.num_classes}, but {self._train} has {len(self.class_names)} folders of classes"
            )
        listing = list_pictures(self._train, self.class_names)
        self._listings = [listing]  # that have been made
        if self._val is None:
            split = _held_out(listing, self._held_out)
            return {training: Paths(listing, part, self._root) for training, part in split.items() if len(part)}
        strange = set(_classes(self._val)) - set(self.class_names)
        if strange:
            names = ", ".join(map(escape_line, sorted(strange)[:5]))
            raise Refusal(f"{self._val} has classes that {self._train} has not: {names}")
        try:
            evaluation = list_pictures(self._val, self.class_names, self._allow_empty)
        except Refusal as error:
            raise Refusal(f"{error}; data.allow_empty=true evaluates without such classes") from error
        self._listings.append(evaluation)
        listings = {True: listing, False: evaluation}
        return {key: Paths(every, numpy.arange(len(every.ends)), self._root) for key, every in listings.items()}

    def _sources(self, training: bool) -> Paths:
        return self._paths[training]


class Paths:
    """Some files of a listing, and their labels."""

    def __init__(self, listing: Listing, indices: NDArray[numpy.int64], root: Path) -> None:
        self._listing, self._indices, self._root = listing, indices, root  # indices: (N,) of the listing, ascending
        labels = numpy.arange(len(listing.counts)).repeat(listing.counts)
        self.labels = torch.from_numpy(labels[indices])  # (N,)

    def source(self, at: int) -> str:
        """The path."""
        return self.name(at)

    def name(self, at: int) -> str:
        """The path."""
        return os.fsdecode(os.path.join(self._listing.folder, self._listing.name(self._indices[at])))

    def fingerprint(self) -> str:
        """From all names below the root, classes among them, and the sizes of some files."""
        size, above = len(self._indices), len(os.fsencode(self._root))
        prefix = os.path.join(self._listing.folder, b"")[above:]
        found, between = sha256(), b""
        for start in range(0, size, 4096):
            part = self._indices[start : start + 4096]
            found.update(between + b"\n".join(prefix + self._listing.name(at) for at in part))
            between = b"\n"
        for at in range(0, size, -(-size // _SIZES)):
            with suppress(OSError):  # a link to nothing, which decoding will meet
                found.update(str(os.path.getsize(self.name(at))).encode())
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


def _held_out(listing: Listing, part: float) -> dict[bool, NDArray[numpy.int64]]:
    """The indices of a listing in two: of each class this part goes to the evaluation.

    Those whose names have the smallest hashes: the same ones wherever the folder lies, and mostly the same ones when
    pictures are added.
    """
    chosen, start = numpy.zeros(len(listing.hashes), bool), 0
    for own in listing.counts.tolist():
        # one at least, and not the last one
        count = min(max(round(part * own), 1), own - 1) if part else 0
        # (own,): of equal names, in two subfolders, the path decides
        ranked = listing.hashes[start : start + own].argsort(stable=True)
        chosen[start + ranked[:count]] = True
        start += own
    return {True: numpy.flatnonzero(~chosen), False: numpy.flatnonzero(chosen)}
