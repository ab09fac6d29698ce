"""One draw of a forward: random numbers of each sample, laid out as the caller has its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.rng import POSITIVE, Random, TensorPart, mix_seeds, seed_torch
from trainer.parallel.context_parallel import Pieces


class Rows(NamedTuple):
    """Whose the rows of a tensor are: those of samples lie along one dimension, for each of several views of a batch.

    So (B, …) has dim 0 and one view. Sample after sample with k rows each, (B · k, …), has one view, too; view after
    view, (k · B, …), has as many as there are rows for a sample. dim None: rows belong to no sample, and all ranks draw
    the same.
    """

    dim: int | None
    views: int | None = 1  # None: each view has one row of a sample

    def of_sample(self, shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
        """The numbers of one sample, (views, rows, …), in a tensor of this shape for so many samples.

        ValueError where its size is no multiple of the samples.
        """
        if self.dim is None:
            return shape
        size, rest = shape[self.dim], (*shape[: self.dim], *shape[self.dim + 1 :])
        views = self.views or max(1, size // batch)
        if size % (batch * views):
            raise ValueError(f"{size} rows are not those of {batch} samples")
        return (views, size // (batch * views), *rest)


class Site(NamedTuple):
    """A place of a network that draws."""

    rows: Rows
    whole: tuple[int, ...] | None = None  # the numbers of one sample, (views, rows, …), in one process
    tokens: int = 0  # of each sample, as these numbers were counted


@dataclass
class DrawSites:
    """All places of a task and its network that draw. `notes`: what a user should know of them."""

    sites: dict[tuple[bool, int], Site] = field(default_factory=dict)  # by mode (training?) and number of the draw
    # the same by the place in a unit's code, for calls that the forward at the start did not make; None: they differ
    lines: dict[tuple[bool, int], Site | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failure: str = ""  # why a forward could not be tried
    python: bool = False  # does a forward draw from Python's or NumPy's generator?

    def add(self, training: bool, number: int, line: int, site: Site) -> None:
        """Know a place."""
        self.sites[training, number] = site
        alike = self.lines.setdefault((training, line), site)
        self.lines[training, line] = site if alike == site else None

    def find(self, training: bool, number: int, line: int) -> Site | None:
        """What is known of a draw."""
        return self.sites.get((training, number)) or self.lines.get((training, line))


@dataclass
class RandomDraw:
    """The numbers of one draw of a forward: each sample's own, or the same for all."""

    batch: int  # B
    samples: Random  # (B,)
    common: Random  # (1,)
    seed: int  # of the step
    number: int  # which draw of the step it is
    rows: Rows
    part: TensorPart | None = None  # what of a sample's numbers, (B, views, rows, …), this rank draws; None: all

    def bernoulli(self, p: float, shape: tuple[int, ...]) -> Tensor:
        """True with probability p."""
        return self._make(shape, lambda random, sizes: random.bernoulli(p, *sizes))

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """In [0, 1), float32."""
        return self._make(shape, lambda random, sizes: random.uniform(*sizes))

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal, float32."""
        return self._make(shape, lambda random, sizes: random.normal(*sizes))

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Whole numbers in [low, high)."""
        return self._make(shape, lambda random, sizes: random.integers(low, high, *sizes))

    def _make(self, shape: tuple[int, ...], make: Callable[[Random, tuple[int, ...]], Tensor]) -> Tensor:
        """A draw of this shape. make: called with streams and a shape that has one row for each stream."""
        dim = self.rows.dim
        if dim is None:
            return make(self.common.of(self.number, self.part), (1, *shape)).view(shape)
        sizes = (self.batch, *self.rows.of_sample(shape, self.batch))
        drawn = make(self.samples.of(self.number, self.part), sizes)  # (B, views, rows, …)
        if sizes[1] > 1:
            drawn = drawn.transpose(0, 1)  # (views, B, rows, …)
        rest = (*shape[:dim], *shape[dim + 1 :])
        return drawn.reshape(shape[dim], *rest).movedim(0, dim)

    def by_torch(self, kernel: Callable[..., Any], args: tuple[Any, ...], in_place: bool) -> Any:
        """What torch's own kernel gives, called for each sample by itself; for all at once where rows are nobody's.

        RuntimeError where ranks hold parts of it: torch draws no part of a tensor.
        """
        if self.part is not None:
            raise RuntimeError(
                "loop.dropout=sample: ranks share a tensor for which torch itself draws (poisson, gamma, …); draw it"
                " where activations are whole, or use strategy=fsdp"
            )
        x, dim, before = args[0], self.rows.dim, torch.default_generator.initial_seed()
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        try:
            if dim is None:
                seed_torch(mix_seeds(self.seed, self.number & POSITIVE), device)
                return kernel(*args)
            result = x if in_place else torch.empty_like(x)
            views = self.rows.of_sample(tuple(x.shape), self.batch)[0]
            places = torch.arange(x.shape[dim], device=device).view(views, self.batch, -1)
            for sample, start in enumerate(self.samples.of(self.number).starts.tolist()):
                own = places[:, sample].flatten()
                seed_torch(start & POSITIVE, device)
                drawn = kernel(*(a.index_select(dim, own) if isinstance(a, Tensor) else a for a in args))
                result.index_copy_(dim, own, drawn)
            return result
        finally:
            torch.default_generator.manual_seed(before)


def find_part(whole: tuple[int, ...], local: tuple[int, ...], pieces: Pieces, loosely: bool) -> TensorPart | None:
    """The part of one sample's numbers that a rank draws; None where these pieces do not tell it.

    whole, local: the sizes in one process and on this rank. loosely: another dimension may differ, too.
    """
    numbers, of = pieces
    for dim, (size, full) in enumerate(zip(local, whole, strict=True)):
        same = all(a == b for at, (a, b) in enumerate(zip(local, whole, strict=True)) if at != dim)
        if (same or loosely) and size != full and size * of == full * len(numbers):
            piece = size // len(numbers)
            places = tuple(range(number * piece, (number + 1) * piece) for number in numbers)
            return TensorPart(dim + 1, places, full)
    return None
