"""Where the samples of a batch lie in what a module gives: found out from two batches of different sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from trainer.data.loader import Batch
from trainer.data.nested_tensors import map_tensors, named_lists, named_tensors
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.batch_gather import current_span
from trainer.parallel.ranks import Ranks
from trainer.verify.training_record import LENGTH, Phase, SampleLayout, sketch_distance, sketch_rows

_TOLERANCE = 1e-9  # of two sketches in float64, relative to the norm


ENTRY_OF_LIST = SampleLayout(-1)  # of a tensor in a list that has an entry for each sample: all of it is that sample's


def detect_layout(large: Tensor, small: Tensor, samples: int, rows: Sequence[int]) -> SampleLayout | None:
    """Where samples lie in a tensor, from what it is for so many samples, and for those of them in these rows.

    None where that cannot be seen, or where the tensor depends on all samples together.
    """
    fewer = len(rows)
    if large.dim() != small.dim() or not large.numel() or not small.numel():
        return None
    differing = [dim for dim in range(large.dim()) if large.shape[dim] != small.shape[dim]]
    if not differing:
        same = SampleLayout(-1, size=large.numel(), shape=tuple(large.shape))
        return same if _fits_both(same, large, small, samples, [0]) else None
    (dim, *others) = differing  # the dimension whose size follows the number of samples
    if others or large.shape[dim] * fewer != small.shape[dim] * samples or large.shape[dim] % samples:
        return None
    # entries of that dimension, and numbers, for each sample
    each, size = large.shape[dim] // samples, large.numel() // samples
    default = SampleLayout(dim, each, True, size, shape=(*large.shape[:dim], 0, *large.shape[dim + 1 :]))
    integral = not (large.is_floating_point() or large.is_complex() or large.dtype == torch.bool)
    if each == 1 and not integral:
        return default
    # several entries for a sample: together, or in turn with those of others?
    candidates = [default, default._replace(outer=False)] if each > 1 else [default]
    if integral and (size > 1 or bool((large.diff(dim=dim) >= 0).all())):
        candidates += [candidate._replace(local=True) for candidate in candidates]
    match = next((candidate for candidate in candidates if _fits_both(candidate, large, small, samples, rows)), None)
    return default if each == 1 and match is None else match


def detect_layouts(
    name: str, large: Any, small: Any, samples: int, rows: Sequence[int], read: bool
) -> dict[str, SampleLayout]:
    """Where samples lie in the tensors of a tree, by their places: from what it is for all samples, and for these rows.

    read: it is what was read of the samples, and no network has made it of them.
    """
    # lists that have an entry for each sample: as long as there are samples, in both
    fewer = {place: len(entries) for place, entries in named_lists(small, name)}
    long_lists = {
        place for place, entries in named_lists(large, name) if len(entries) == samples > fewer.get(place, samples)
    }
    lists_by_sample = {place for place in long_lists if fewer[place] == len(rows)}
    small_tensors = {(place, at): x for place, at, x in split_by_sample(small, name, len(rows), lists_by_sample)}
    agreements: dict[str, list[bool]] = {}  # of each place in lists: is what a sample has the same in both?
    layouts: dict[str, SampleLayout | None] = {}
    for place, sample, x in split_by_sample(large, name, samples, lists_by_sample):
        # the same sample in the smaller batch
        at = None if sample is None else rows.index(sample) if sample in rows else -1
        small_tensor = small_tensors.get((place, at))
        if sample is None and small_tensor is not None:
            layouts[place] = detect_layout(x, small_tensor, samples, rows)
        elif sample is not None and small_tensor is not None:
            # an item that is read in another way is a mistake; one that is padded to its neighbours is none
            agrees = x.shape == small_tensor.shape and (
                read or same_rows(x.reshape(1, -1), small_tensor.reshape(1, -1))
            )
            agreements.setdefault(place, []).append(agrees)
    layouts |= {place: ENTRY_OF_LIST for place, agrees in agreements.items() if all(agrees)}
    return {place: layout for place, layout in layouts.items() if layout is not None}


def split_by_sample(
    tree: Any, name: str, samples: int, known: Collection[str]
) -> Iterator[tuple[str, int | None, Tensor]]:
    """Every tensor of a tree with its place there, and whose it is where a list has an entry for each sample.

    known: the places of such lists, of which `*` then stands for the number in the place. None: it is everybody's.
    """
    places_by_sample = [
        place for place, entries in named_lists(tree, name) if place in known and len(entries) == samples
    ]
    for place, entries in named_lists(tree, name):
        if place in places_by_sample and not any(place.startswith(f"{outer}.") for outer in places_by_sample):
            for sample, entry in enumerate(entries):
                for inner, x in named_tensors(entry, f"{place}.*"):
                    yield inner, sample, x
    for place, x in named_tensors(tree, name):
        if not any(place.startswith(f"{outer}.") for outer in places_by_sample):
            yield place, None, x


def _fits_both(layout: SampleLayout, large: Tensor, small: Tensor, samples: int, rows: Sequence[int]) -> bool:
    large_rows, small_rows = layout.rows(large, samples), layout.rows(small, len(rows))
    return large_rows is not None and small_rows is not None and same_rows(large_rows[list(rows)], small_rows)


def same_rows(first: Tensor, second: Tensor) -> bool:
    """Are two tensors (rows, numbers) the same but for what rounding makes?"""
    if first.shape != second.shape:
        return False
    sketches, other_sketches = sketch_rows(first), sketch_rows(second)
    return bool((sketch_distance(sketches, other_sketches) <= _TOLERANCE * sketches[:, LENGTH]).all())


class ModuleObserver:
    """Observes what goes into a step and what each module of a network gives."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks) -> None:
        self.ranks, self.active = ranks, False  # active: is a step under way that is observed?
        self._calls: Counter[tuple[str, range]] = Counter()  # of a module, in each micro-batch of the step
        for name, module in modules:
            module.register_forward_hook(partial(self._called, name))

    @contextmanager
    def listening(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Within this context the step of these micro-batches is observed."""
        for batch in batches:
            for tree, name in ((batch.inputs, "inputs"), (batch.targets, "targets")):
                self._observe(Phase.DATA, name, 0, tree, self._rows(batch.span))
        self._calls.clear()
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _called(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        """A forward hook. What runs without gradient is an evaluation, in the backward a recomputation."""
        span = current_span()
        if not self.active or span is None or not torch.is_grad_enabled() or in_backward():
            return
        call = self._calls[name, span]
        self._calls[name, span] += 1
        self._observe(Phase.FORWARD, name, call, _unpacked(output), self._rows(span))

    def _rows(self, span: range) -> Sequence[int]:
        """Which samples of the global batch this rank has of a span: rank r has every size-th one."""
        return span[(self.ranks.rank - span.start) % self.ranks.size :: self.ranks.size]

    def _observe(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        """Take what was observed of these rows of the global batch: tensors, in whatever they are."""
        raise NotImplementedError


def _unpacked(output: Any) -> Any:
    """An output with a list of the samples' sequences in place of packed ones, which lie in each other by length."""
    if isinstance(output, PackedSequence):
        return unpack_sequence(output)
    return tuple(map(_unpacked, output)) if type(output) is tuple else output


Place = tuple[str, str, int]  # phase, name, call


class LayoutDetector(ModuleObserver):
    """Keeps what two batches give, the second one some samples of the first, to see where samples lie."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks) -> None:
        super().__init__(modules, ranks)
        self._seen: list[tuple[Sequence[int], dict[Place, Any]]] = []  # rows, and what was observed of them

    @contextmanager
    def listening(self, batches: Sequence[Batch]) -> Iterator[None]:
        """The step of one micro-batch."""
        self._seen.append((self._rows(batches[0].span), {}))
        with super().listening(batches):
            yield

    def _observe(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        self._seen[-1][1][phase, name, call] = map_tensors(tree, lambda x: x.detach().clone())

    def layouts(self) -> dict[Place, SampleLayout]:
        """Where samples lie, of all that has shown it."""
        (every, large), (rows, small) = self._seen
        layouts: dict[Place, SampleLayout] = {}
        for (phase, name, call), large_tree in large.items():
            if (phase, name, call) in small:
                small_tree = small[phase, name, call]
                places = detect_layouts(name, large_tree, small_tree, len(every), rows, phase == Phase.DATA)
                layouts |= {(phase, place, call): layout for place, layout in places.items()}
        return layouts
