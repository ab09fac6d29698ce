"""Pictures in classes out of a Hugging Face data set: in a folder, or by its name on the hub."""

from __future__ import annotations

import io
from hashlib import sha256
from typing import Any, Literal

from recipes.splits import class_count, class_names, labels, numbered, splits
from recipes.vision.augment import Augment
from recipes.vision.decode import Windows
from recipes.vision.decoded import DecodedPictures
from trainer.messages import Refusal

_PICTURES = 16  # whose bytes tell one set from another


class HuggingFaceImages(DecodedPictures):
    """The pictures and labels of two columns of a data set that the package `datasets` loads (extra `hf`).

    `path`: a folder that its `save_to_disk` wrote, else what its `load_dataset` takes: a name on the hub, or a folder
    of files.
    """

    def __init__(
        self,
        augment: Augment,
        window: Windows,
        path: str,
        image_size: int,
        subset: str | None = None,
        train: str = "train",
        evaluation: str | None = "test",
        image: str = "image",
        label: str = "label",
        channels: Literal[1, 3] = 3,
        num_classes: int | None = None,
        on_bad: Literal["raise", "skip"] = "raise",
        bad_budget: float = 0.05,
        repeat: int = 1,
        balance: float = 0.0,
        eval_image_size: int | None = None,
        image_sizes: list[list[int]] | None = None,
    ) -> None:
        super().__init__(
            augment, window, image_size, eval_image_size, channels, on_bad, bad_budget, repeat, balance, image_sizes
        )
        found = splits(path, subset, train, evaluation, {"data.image": image, "data.label": label})
        for split in found.values():
            _refuse_other_columns(split, image, path)
        names = {True: train, False: evaluation}
        ready = numbered(found, label)
        self.class_names = class_names(ready[True], label)
        self._rows = {at: Rows(split, f"{path} {names[at]}", image, label) for at, split in ready.items()}
        classes = max(rows.classes for rows in self._rows.values())
        self.num_classes = class_count(num_classes, classes, f"the column {label} of {path}")

    def evaluation(self) -> Any:
        """The pictures of the split for evaluation; None where none was named."""
        return super().evaluation() if False in self._rows else None

    def _sources(self, training: bool) -> Rows:
        return self._rows[training]


class Rows:
    """The pictures of a column, still compressed, and the labels of another one."""

    def __init__(self, split: Any, name: str, image: str, label: str) -> None:
        from datasets import Image

        # compressed as they are: decoding is for the worker processes
        self._split, self._image, self._name = split.cast_column(image, Image(decode=False)), image, name
        self.labels, self.classes = labels(split, label)

    def source(self, at: int) -> Any:
        """The picture's bytes, or its path."""
        found = self._split[at][self._image]
        return io.BytesIO(found["bytes"]) if found["bytes"] else found["path"]

    def name(self, at: int) -> str:
        """Which data set, split and row."""
        return f"{self._name}[{at}]"

    def fingerprint(self) -> str:
        """From all labels, and the compressed bytes of some pictures."""
        size = len(self.labels)
        found = sha256(self.labels.numpy().tobytes())
        for at in range(0, size, -(-size // _PICTURES)) if size else ():
            found.update(self._split[at][self._image]["bytes"] or b"")
        return found.hexdigest()[:16]


def _refuse_other_columns(split: Any, image: str, path: str) -> None:
    from datasets import Image

    if not isinstance(split.features[image], Image):
        raise Refusal(f"data.image={image}: this column of {path} holds no pictures: {split.features[image]}")
