"""Where the samples of a batch lie in what a module gives: found out from two batches of different sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.nested_tensors import named_lists, named_tensors
from trainer.parallel.context_parallel import Pieces
from trainer.verify.tensor_sketch import LENGTH, moved, signatures

_ALIKE = 1e-9  # of two signatures in float64, relative to the norm


class Layout(NamedTuple):
    """Where the samples of a batch lie in a tensor."""

    dim: int  # their dimension; -1: there is none, the tensor is the same for every batch
    each: int = 1  # entries of that dimension for a sample: windows of an image, words of a text
    outer: bool = True  # the entries of a sample stand together; else those of all samples alternate
    size: int = 0  # numbers of a sample; 0: it may have any number of them
    local: bool = False  # whole numbers that count from where a sample begins in the batch: the nodes of a graph
    shape: tuple[int, ...] = ()  # of the tensor; 0 where the samples are

    @classmethod
    def of(cls, dim: int, each: int, outer: bool, size: int, local: bool, shape: Sequence[int]) -> Layout:
        """Back from a file, which knows lists alone."""
        return cls(dim, each, outer, size, local, tuple(shape))

    def rows(self, x: Tensor, samples: int) -> Tensor | None:
        """(samples, size): a row for each sample; None where the tensor has another shape than it must have then."""
        if self.dim < 0:
            return x.reshape(1, -1) if x.numel() == self.size or not self.size else None
        if x.dim() <= self.dim or x.shape[self.dim] != samples * self.each or x.numel() != samples * self.size:
            return None
        x = x.movedim(self.dim, 0)
        x = x.unflatten(0, (samples, self.each) if self.outer else (self.each, samples))
        x = (x if self.outer else x.transpose(0, 1)).flatten(1)
        return x.to(torch.float64) - x[:, :1] if self.local else x

    def around(self, x: Tensor, samples: int, own: Pieces, tokens: int) -> Tensor | None:
        """All of a tensor of which `x` is these pieces of the sequences, with zeros in the place of the others.

        tokens: of the whole sequences. None where it is no such tensor.
        """
        if x.dim() != len(self.shape):
            return None
        shape = [samples * self.each if dim == self.dim else size for dim, size in enumerate(self.shape)]
        (dim, *others) = [dim for dim in range(x.dim()) if x.shape[dim] != shape[dim]] or [-1]
        size, parts = tokens // own.of, len(own.numbers)
        if dim < 0 or others or shape[dim] != tokens or x.shape[dim] != size * parts:
            return None
        around = x.new_zeros(shape)
        for number, piece in zip(own.numbers, x.split(size, dim), strict=True):
            around.narrow(dim, number * size, size).copy_(piece)
        return around


ONE = Layout(-1)  # of a tensor in a list that has an entry for each sample: all of it is that sample's


def layout(large: Tensor, small: Tensor, samples: int, rows: Sequence[int]) -> Layout | None:
    """Where samples lie in a tensor, from what it is for so many samples, and for those of them in these rows.

    None where that cannot be seen, or where the tensor depends on all samples together.
    """
    fewer = len(rows)
    if large.dim() != small.dim() or not large.numel() or not small.numel():
        return None
    differing = [dim for dim in range(large.dim()) if large.shape[dim] != small.shape[dim]]
    if not differing:
        same = Layout(-1, size=large.numel(), shape=tuple(large.shape))
        return same if _alike(same, large, small, samples, [0]) else None
    (dim, *others) = differing
    if others or large.shape[dim] * fewer != small.shape[dim] * samples or large.shape[dim] % samples:
        return None
    each, size = large.shape[dim] // samples, large.numel() // samples
    first = Layout(dim, each, True, size, shape=(*large.shape[:dim], 0, *large.shape[dim + 1 :]))
    whole = not (large.is_floating_point() or large.is_complex() or large.dtype == torch.bool)
    if each == 1 and not whole:
        return first
    # several entries for a sample: together, or in turn with those of others?
    tries = [first, first._replace(outer=False)] if each > 1 else [first]
    if whole and (size > 1 or bool((large.diff(dim=dim) >= 0).all())):
        tries += [one._replace(local=True) for one in tries]
    seen = next((one for one in tries if _alike(one, large, small, samples, rows)), None)
    return first if each == 1 and seen is None else seen


def layouts(name: str, large: Any, small: Any, samples: int, rows: Sequence[int], read: bool) -> dict[str, Layout]:
    """Where samples lie in the tensors of a tree, by their places: from what it is for all samples, and for these rows.

    read: it is what was read of the samples, and no network has made it of them.
    """
    fewer = {place: len(entries) for place, entries in named_lists(small, name)}
    long = {place for place, entries in named_lists(large, name) if len(entries) == samples > fewer.get(place, samples)}
    known = {place for place in long if fewer[place] == len(rows)}
    some = {(place, at): x for place, at, x in by_sample(small, name, len(rows), known)}
    others: dict[str, list[bool]] = {}  # of each place in lists: is what a sample has the same in both?
    found: dict[str, Layout | None] = {}
    for place, sample, x in by_sample(large, name, samples, known):
        at = None if sample is None else rows.index(sample) if sample in rows else -1
        other = some.get((place, at))
        if sample is None and other is not None:
            found[place] = layout(x, other, samples, rows)
        elif sample is not None and other is not None:
            # an item that is read in another way is a mistake; one that is padded to its neighbours is none
            same = x.shape == other.shape and (read or alike(x.reshape(1, -1), other.reshape(1, -1)))
            others.setdefault(place, []).append(same)
    found |= {place: ONE for place, same in others.items() if all(same)}
    return {place: one for place, one in found.items() if one is not None}


def by_sample(tree: Any, name: str, samples: int, known: Collection[str]) -> Iterator[tuple[str, int | None, Tensor]]:
    """Every tensor of a tree with its place there, and whose it is where a list has an entry for each sample.

    known: the places of such lists, of which `*` then stands for the number in the place. None: it is everybody's.
    """
    listed = [place for place, entries in named_lists(tree, name) if place in known and len(entries) == samples]
    for place, entries in named_lists(tree, name):
        if place in listed and not any(place.startswith(f"{outer}.") for outer in listed):
            for sample, entry in enumerate(entries):
                for inner, x in named_tensors(entry, f"{place}.*"):
                    yield inner, sample, x
    for place, x in named_tensors(tree, name):
        if not any(place.startswith(f"{outer}.") for outer in listed):
            yield place, None, x


def _alike(found: Layout, large: Tensor, small: Tensor, samples: int, rows: Sequence[int]) -> bool:
    one, other = found.rows(large, samples), found.rows(small, len(rows))
    return one is not None and other is not None and alike(one[list(rows)], other)


def alike(one: Tensor, other: Tensor) -> bool:
    """Are two tensors (rows, numbers) the same but for what rounding makes?"""
    if one.shape != other.shape:
        return False
    mine, others = signatures(one), signatures(other)
    return bool((moved(mine, others) <= _ALIKE * mine[:, LENGTH]).all())
