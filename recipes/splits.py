"""Hugging Face data sets: the splits and columns that keys name, and labels as numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.hub import located
from trainer.messages import Refusal, did_you_mean, first_line


def splits(
    path: str, subset: str | None, train: str, evaluation: str | None, columns: Mapping[str, str]
) -> dict[bool, Any]:
    """The splits of a data set by what they are for: True: training, False: evaluation, where one is named.

    path: a folder that `save_to_disk` wrote, else what `load_dataset` takes. columns: what a split must have, by the
    keys that say so. Refusal where the package `datasets`, the data set, a split or a column is not there.
    """
    there = _loaded(path, subset)
    names = {True: train} if evaluation is None else {True: train, False: evaluation}
    for training, name in names.items():
        if name not in there:
            key = "data.train" if training else "data.evaluation"
            raise Refusal(_missing(f"{key}={name}: {path} has no such split", name, there))
    for name in names.values():
        own = there[name].features
        for key, column in columns.items():
            if column not in own:
                raise Refusal(_missing(f"{key}={column}: split {name} of {path} has no such column", column, own))
    return {training: there[name] for training, name in names.items()}


def numbered(found: Mapping[bool, Any], label: str) -> dict[bool, Any]:
    """The splits with numbers for labels: words are numbered by their order, in all splits together."""
    from datasets import DatasetDict

    if found[True].features[label].dtype != "string":
        return dict(found)
    encoded = DatasetDict({str(training): split for training, split in found.items()}).class_encode_column(label)
    return {training: encoded[str(training)] for training in found}


def labels(split: Any, label: str) -> tuple[Tensor, int]:
    """The class numbers of a split, (N,) int64, and how many classes there are."""
    from datasets import ClassLabel

    numbers = torch.tensor(split.with_format("numpy")[label][:], dtype=torch.int64)
    kind = split.features[label]
    return numbers, kind.num_classes if isinstance(kind, ClassLabel) else int(numbers.max()) + 1


def class_names(split: Any, label: str) -> list[str]:
    """What the classes of a column are called; nothing where its labels are plain numbers."""
    return list(getattr(split.features[label], "names", None) or ())


def class_count(asked: int | None, found: int, where: str) -> int:
    """How many classes a network is to tell apart; Refusal where fewer are asked for than there are."""
    if asked is not None and asked < found:
        raise Refusal(f"data.num_classes={asked}, but {where} has {found} classes")
    return found if asked is None else asked


def _missing(said: str, name: str, there: Collection[str]) -> str:
    return f"{said}; it has {', '.join(there)}{did_you_mean(name, there)}"


def _loaded(path: str, subset: str | None) -> dict[str, Any]:
    """All splits of a data set, by name."""
    try:
        import datasets
    except ImportError as error:
        raise Refusal("a Hugging Face data set needs the package datasets: pip install -e '.[hf]'") from error
    where = located(path, "data.path=")
    place = Path(where)
    try:
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            found = datasets.load_from_disk(str(place))
        else:
            found = datasets.load_dataset(where, subset)
    except Exception as error:  # of a hub, a network, a format: all of them say that there is no such data set here
        raise Refusal(f"data.path={path} cannot be loaded as a data set: {first_line(error)}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}
