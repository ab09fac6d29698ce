"""The names of classes: as files store them, in a message, and refused where they are not those of a run."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.data import Data
from trainer.messages import Refusal

_MAX_CHARACTERS = 2**21  # of all names together: they are in the JSON of every checkpoint
_MAX_SHOWN = 12  # names in a message


def read_class_names(data: Data) -> list[str]:
    """The class names as files store them; an empty list if the data has none, or too many for a file."""
    # a name of a folder may hold bytes that are no text
    names = [str(name).encode(errors="backslashreplace").decode() for name in data.class_names]
    return names if sum(map(len, names)) <= _MAX_CHARACTERS else []


def refuse_other_classes(data_names: Sequence[str], names: Sequence[str]) -> None:
    """Refuse data with other classes than those of a run, or the same in another order: its numbers mean others.

    Where one of the two has no names, nothing is known.
    """
    if names and data_names and [*names] != [*data_names]:
        raise Refusal(
            f"the classes of this data are {format_class_names(data_names)}; the run was trained on"
            f" {format_class_names(names)}: take data with these classes, in this order"
        )


def format_class_names(names: Sequence[str]) -> str:
    """Names in a message: the first ones, and how many there are."""
    more = f", … ({len(names):,} in all)" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
