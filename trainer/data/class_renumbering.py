"""Classes by name: gives the classes of another data set the numbers that a run was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.data import Data
from trainer.messages import BadData, Refusal

_MAX_CHARACTERS = 2**21  # of all names together: they are in the JSON of every checkpoint
_MAX_SHOWN = 12  # names in a message


def read_class_names(data: Data) -> list[str]:
    """The class names as files store them; an empty list if the data has none, or too many for a file."""
    # a name of a folder may hold bytes that are no text
    names = [str(name).encode(errors="backslashreplace").decode() for name in data.class_names]
    return names if sum(map(len, names)) <= _MAX_CHARACTERS else []


def renumber_classes(data: Data, names: Sequence[str]) -> Data:
    """The same data with its classes numbered as in `names`, those of a run; it need not have all of them.

    The data itself if its numbers are the same already, or if one of the two has no names. Refusal if it has a class
    that the run does not know.
    """
    data_names = read_class_names(data)
    if not names or not data_names or data_names == list(names):
        return data
    if unknown := [name for name in data_names if name not in set(names)]:
        raise Refusal(
            f"the classes of this data are {format_class_names(data_names)}; the run was trained on"
            f" {format_class_names(names)}. It does not know {format_class_names(unknown)}: classes are matched by"
            " their names, so rename or leave out what differs"
        )
    numbers = {name: number for number, name in enumerate(names)}
    table = torch.tensor([numbers[name] for name in data_names])  # (classes of the data,)
    return _RenumberedData(data, names, table)


def format_class_names(names: Sequence[str]) -> str:
    """Names in a message: the first ones, and how many there are."""
    more = f", … ({len(names):,} in all)" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


class _RenumberedData(Data):
    """Data whose class numbers (B,) become those of a run when a batch is made."""

    def __init__(self, data: Data, names: Sequence[str], numbers: Tensor) -> None:
        self._data, self.class_names, self._numbers = data, names, numbers
        self.collate = data.collate  # type: ignore[method-assign]  # the method itself, by which sets of tensors are known
        self.as_pictures = data.as_pictures  # type: ignore[method-assign]

    def train(self) -> Dataset:
        return self._data.train()

    def evaluation(self) -> Dataset | None:
        return self._data.evaluation()

    def plain_train(self) -> Dataset:
        return self._data.plain_train()

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> tuple[Any, Any]:
        inputs, targets = self._data.augment(inputs, targets, random, training)
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            raise BadData(
                f"the classes of {type(self._data).__name__} have other numbers than those of the run, and its targets"
                " are not one class number for each sample: give its classes in the run's order,"
                f" {format_class_names(self.class_names)}"
            )
        table = self._numbers.to(targets.device)  # (classes of the data,) → numbers of the run
        return inputs, table[targets.clamp_min(0)].where(targets >= 0, targets)  # -100 stays: no class
