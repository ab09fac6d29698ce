"""A short text that tells one data set from another, from the number of its samples and from some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor

from trainer.data.seeded_items import put_back
from trainer.data.seeds import mix, seed_all

_ITEMS = 8  # that are looked at, from the first to the last
_READINGS = 3  # of each of them, under other seeds: what then differs is drawn at random


def of_items(dataset: Any) -> str:
    """16 hex digits from the length and some items of a map-style data set; empty where its items cannot be read.

    What is random in an item (augmentation, noise) is found by reading it again, and left out. Floating-point numbers
    count with four digits of their mean magnitude, since another processor may compute them with other last bits.
    """
    size = len(dataset)
    some = sorted({at * (size - 1) // (_ITEMS - 1) for at in range(_ITEMS)}) if size else []
    # of a copy: a file that the first item opens must not be open in workers that are forked later
    try:
        read = _reader(copy(dataset))
        with put_back():
            readings = [[_leaves_of(read, at, number) for at in some] for number in range(_READINGS)]
    except Exception:  # whatever it is, training meets it too and says it better
        return ""
    # a place that one item fills at random is random in all: eight coins may fall alike, but not three times each
    moved = {
        place
        for first, *others in zip(*readings, strict=True)
        for other in others
        for place in first.keys() | other.keys()
        if first.get(place) != other.get(place)
    }
    found = sha256(str(size).encode())
    for leaves in readings[0]:
        for place in sorted(leaves.keys() - moved):
            found.update(f"{place}\0".encode() + leaves[place])
    return found.hexdigest()[:16]


def _reader(dataset: Any) -> Callable[[int], Any]:
    """Reads one item, as a batch of one where the set is read in whole batches."""
    batch = getattr(dataset, "batch", None)
    return (lambda at: batch(torch.tensor([at]))) if callable(batch) else dataset.__getitem__


def _leaves_of(read: Callable[[int], Any], at: int, number: int) -> dict[str, bytes]:
    seed_all(mix(number, at))
    return dict(_leaves(read(at), ""))


def _leaves(item: Any, place: str) -> Iterator[tuple[str, bytes]]:
    """Every value of an item by its place there, as bytes; what has no values that one can see is left out."""
    if isinstance(item, (bytes, str, int, type(None))):
        yield place, repr(item).encode()
    elif isinstance(item, Mapping):
        yield from (leaf for key in item for leaf in _leaves(item[key], f"{place}.{key}"))
    elif isinstance(item, (list, tuple)):
        yield from (leaf for key, value in enumerate(item) for leaf in _leaves(value, f"{place}.{key}"))
    elif is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item)]
        yield from (leaf for name in names for leaf in _leaves(getattr(item, name), f"{place}.{name}"))
    elif isinstance(item, (float, Tensor)) or hasattr(item, "__array__") or hasattr(item, "__array_interface__"):
        yield place, _numbers(item)  # a picture of PIL is decoded here


def _numbers(item: Any) -> bytes:
    """The kind, the shape and the values of an array."""
    if isinstance(item, Tensor):
        item = item.detach().cpu()
        item = item.float() if item.is_floating_point() else item  # numpy has no bfloat16
    values = numpy.ascontiguousarray(item)
    if values.dtype.hasobject:
        said = b""  # addresses, others in each process
    elif values.dtype.kind in "fc":
        said = f"{numpy.abs(values).mean(dtype=numpy.float64):.4g}".encode() if values.size else b""
    else:
        said = values.tobytes()
    return f"{values.dtype.kind}{values.shape}".encode() + said
