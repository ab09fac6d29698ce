"""Classes by their names: a number means a class only together with the list of names that it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.data import Data
from trainer.messages import BadData, Refusal

_MOST = 2**21  # characters of all names that are kept: they are in the JSON of every checkpoint
_SHOWN = 12  # names in a message


def read_class_names(data: Data) -> list[str]:
    """The names of the data's classes as files keep them; none where it has none, or more than a file should hold."""
    # a name of a folder may hold bytes that are no text
    names = [str(name).encode(errors="backslashreplace").decode() for name in data.class_names]
    return names if sum(map(len, names)) <= _MOST else []


def renumber_classes(data: Data, names: Sequence[str]) -> Data:
    """The same data with its classes numbered as in `names`, those of a run; it need not have all of them.

    The data itself where its numbers are the same already, or where one of the two has no names. Refusal where it has
    a class that the run does not know.
    """
    there = read_class_names(data)
    if not names or not there or there == list(names):
        return data
    if strange := [name for name in there if name not in set(names)]:
        raise Refusal(
            f"the classes of this data are {format_class_names(there)}; the run was trained on"
            f" {format_class_names(names)}. It does not know {format_class_names(strange)}: classes are matched by"
            " their names, so rename or leave out what differs"
        )
    numbers = {name: number for number, name in enumerate(names)}
    return _Renumbered(data, names, torch.tensor([numbers[name] for name in there]))


def format_class_names(names: Sequence[str]) -> str:
    """Names for people: not more than fit a message."""
    more = f", … ({len(names):,} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class _Renumbered(Data):
    """Data whose class numbers (B,) become those of a run when a batch is made."""

    def __init__(self, data: Data, names: Sequence[str], numbers: Tensor) -> None:
        self._data, self.class_names, self._numbers = data, names, numbers
        self.collate = data.collate  # type: ignore[method-assign]  # itself: sets of tensors are read as such
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
        table = self._numbers.to(targets.device)
        return inputs, table[targets.clamp_min(0)].where(targets >= 0, targets)  # -100 stays: no class
