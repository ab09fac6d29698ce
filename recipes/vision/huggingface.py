"""Pictures in classes out of a Hugging Face data set: in a folder, or by its name on the hub."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from recipes.vision.augment import Augment
from recipes.vision.decode import Windows
from recipes.vision.decoded import DecodedPictures
from trainer.refusal import Refusal, nearest


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
        on_bad: Literal["error", "skip"] = "error",
        repeat: int = 1,
        balance: float = 0.0,
        eval_image_size: int | None = None,
    ) -> None:
        super().__init__(augment, window, image_size, eval_image_size, channels, on_bad, repeat, balance)
        names = {True: train} if evaluation is None else {True: train, False: evaluation}
        splits = _chosen(path, _loaded(path, subset), names, image, label)
        self._rows = {training: Rows(splits[name], f"{path} {name}", image, label) for training, name in names.items()}
        found = max(rows.classes for rows in self._rows.values())
        self.num_classes = found if num_classes is None else num_classes
        if self.num_classes < found:
            raise Refusal(f"data.num_classes={num_classes}, but the column {label} of {path} has {found} classes")

    def evaluation(self) -> Any:
        """The pictures of the split for evaluation; None where none was named."""
        return super().evaluation() if False in self._rows else None

    def _sources(self, training: bool) -> Rows:
        return self._rows[training]


class Rows:
    """The pictures of a column, still compressed, and the labels of another one."""

    def __init__(self, split: Any, name: str, image: str, label: str) -> None:
        from datasets import ClassLabel, Image

        # compressed as they are: decoding is for the worker processes
        self._split, self._image, self._name = split.cast_column(image, Image(decode=False)), image, name
        self.labels = torch.tensor(split.with_format("numpy")[label][:], dtype=torch.int64)  # (N,)
        kind = split.features[label]
        self.classes = kind.num_classes if isinstance(kind, ClassLabel) else int(self.labels.max()) + 1

    def source(self, at: int) -> Any:
        """The picture's bytes, or its path."""
        found = self._split[at][self._image]
        return io.BytesIO(found["bytes"]) if found["bytes"] else found["path"]

    def name(self, at: int) -> str:
        """Which data set, split and row."""
        return f"{self._name}[{at}]"


def _chosen(path: str, splits: Any, names: Mapping[bool, str], image: str, label: str) -> Any:
    """The splits of these names, their labels as numbers. Refusal where a split or a column is not there."""
    from datasets import DatasetDict, Image

    keys = {True: "data.train", False: "data.evaluation"}
    for training, name in names.items():
        if name not in splits:
            raise Refusal(_missing(f"{keys[training]}={name}: {path} has no such split", name, splits))
    for name in names.values():
        columns = splits[name].features
        for key, column in (("data.image", image), ("data.label", label)):
            if column not in columns:
                raise Refusal(_missing(f"{key}={column}: split {name} of {path} has no such column", column, columns))
        if not isinstance(columns[image], Image):
            raise Refusal(f"data.image={image}: this column of {path} holds no pictures: {columns[image]}")
    chosen = DatasetDict({name: splits[name] for name in names.values()})
    # words as labels become numbers by their order, in all splits together
    return chosen.class_encode_column(label) if chosen[names[True]].features[label].dtype == "string" else chosen


def _missing(said: str, name: str, there: Collection[str]) -> str:
    return f"{said}; it has {', '.join(there)}{nearest(name, there)}"


def _loaded(path: str, subset: str | None) -> dict[str, Any]:
    """The splits of a data set by name. Refusal where the package or the data set is not there."""
    try:
        import datasets
    except ImportError as error:
        raise Refusal("data=huggingface needs the package datasets: pip install -e '.[hf]'") from error
    place = Path(path).expanduser()
    try:
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            found = datasets.load_from_disk(str(place))
        else:
            found = datasets.load_dataset(str(place) if place.is_dir() else path, subset)
    except Exception as error:  # of a hub, a network, a format: all of them say that there is no such data set here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Refusal(f"data.path={path} cannot be loaded as a data set: {reason}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}
