"""One draw of a forward: random numbers of each sample, laid out as the caller has its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer.data.rng import POSITIVE, Random, TensorPart, mix_seeds, seed_torch
from trainer.parallel.context_parallel import Pieces


class RowCheck:
    """Notices draws whose first dimension changes, and not as the number of samples does."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  # by draw: its rows and the samples, as they were first
        self._noticed = False
        self._notes: list[str] = []  # that nobody has read yet

    def check(self, number: int, module: str, rows: int, samples: int) -> None:
        """A draw of so many rows in a micro-batch of so many samples, which are not its rows."""
        before, then = self._first.setdefault(number, (rows, samples))
        if self._noticed or rows == before or rows * then == before * samples:
            return
        self._noticed = True  # one sentence for a run
        self._notes.append(
            f"loop.dropout=sample: {module or 'the network'} draws random numbers for {before} rows in one micro-batch"
            f" and for {rows} in another, which are not its {samples} samples. If they are parts of samples that stand"
            " one after the other, as nodes of graphs, the numbers follow from where they stand: the curve depends on"
            " loop.micro_batches and on the processes (docs/one-curve.md)"
        )

    def pop_notes(self) -> list[str]:
        """What was noticed since the last call."""
        notes, self._notes = self._notes, []
        return notes


@dataclass
class RandomDraw:
    """The numbers of one draw of a forward: each sample's own, or the same for all where it has no batch."""

    batch: int  # B
    samples: Random  # (B,)
    common: Random  # (1,)
    seed: int  # of the step
    number: int  # which draw of the step it is
    shard: ActivationShard | None  # what of it is this rank's
    time_first: bool  # do the network's activations have the batch second?
    module: str = ""  # that draws
    row_check: RowCheck | None = None  # notices rows that are no samples
    many: bool = False  # may the first dimension be the samples times something, as (B · heads, …)?

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

    @contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """For what has no batch or is not known here: torch's own generators, the same on all ranks."""
        before = torch.default_generator.initial_seed()
        seed_torch(mix_seeds(self.seed, self.number & POSITIVE), device)
        try:
            yield
        finally:
            torch.default_generator.manual_seed(before)

    def _make(self, shape: tuple[int, ...], make: Callable[[Random, tuple[int, ...]], Tensor]) -> Tensor:
        """A draw of this shape. make: called with streams and a shape that has one row for each stream."""
        batch, part = self.batch, self.shard.part(shape) if self.shard else None
        if self.time_first and len(shape) > 1 and shape[1] == batch:  # (T, B, …)
            swapped = (shape[1], shape[0], *shape[2:])
            part = part._replace(dim=1 - part.dim) if part and part.dim < 2 else part
            return make(self.samples.of(self.number, part), swapped).transpose(0, 1)
        if shape and shape[0] == batch:  # (B, …)
            return make(self.samples.of(self.number, part), shape)
        if shape and self.row_check is not None:
            self.row_check.check(self.number, self.module, shape[0], batch)
        part = part._replace(dim=part.dim + 1) if part else None
        if self.many and len(shape) > 1 and shape[0] and shape[0] % batch == 0:  # (B · heads, …)
            return make(self.samples.of(self.number, part), (batch, shape[0] // batch, *shape[1:])).view(shape)
        return make(self.common.of(self.number, part), (1, *shape)).view(shape)  # no batch: weights, masks of positions


@dataclass(frozen=True)
class ActivationShard:
    """The part of an activation's dimension that a tensor rank has."""

    dim: int  # -1: of what a column-wise layer gives, however it is viewed then
    width: int  # of that, on this rank
    pieces: Pieces  # that it has of the whole

    def part(self, shape: tuple[int, ...]) -> TensorPart | None:
        """This rank's part of a draw that has this shape here."""
        dim, (numbers, of) = self._dim(shape), self.pieces
        size = shape[dim] // len(numbers)
        return TensorPart(dim, tuple(range(number * size, (number + 1) * size) for number in numbers), of * size)

    def of_scores(self, dims: int) -> ActivationShard:
        """The same of attention's weights, (…, heads, T, S): channels have become heads."""
        return replace(self, dim=dims - 3) if self.dim < 0 else self

    def _dim(self, shape: tuple[int, ...]) -> int:
        last = len(shape) - 1
        if self.dim >= 0:
            return self.dim
        if shape[last] == self.width or (last < 3 and self.width % shape[last] == 0):
            return last
        # heads of their own width, before they are moved; weights of attention (B, heads, T, T), or values, after
        if last >= 2 and shape[last] * shape[last - 1] == self.width:
            return last - 1
        if last == 3:
            return 1
        raise RuntimeError(
            f"loop.dropout=sample: a draw of shape {shape} between layers that tensor ranks split, where activations"
            f" have {self.width} channels: it is not clear which part of the whole this is; draw it where"
            " activations are whole, or use strategy=fsdp"
        )


@dataclass(frozen=True)
class SequenceShard(ActivationShard):
    """The part of the tokens of an activation, (B, T, …), that a context rank has."""

    def part(self, shape: tuple[int, ...]) -> TensorPart | None:
        """This rank's part; what has one number for each sample is the same on all."""
        return super().part(shape) if len(shape) > 1 else None

    def _dim(self, shape: tuple[int, ...]) -> int:
        if shape[1] == self.width:
            return 1
        raise RuntimeError(
            f"loop.dropout=sample: a draw of shape {shape} where context ranks have {self.width} tokens of each sample,"
            " (B, T, …): it is not clear which part of the whole this is; use loop.dropout=native"
        )

    def of_scores(self, dims: int) -> ActivationShard:
        """The same of attention's weights, (…, heads, T, S): the rows are this rank's tokens."""
        if self.width < 0:
            raise RuntimeError(
                "loop.dropout=sample: dropout in attention whose tokens context ranks split and whose heads tensor"
                " ranks split: of both at once no part can be drawn; use strategy.tensor=1, or no dropout in attention"
            )
        return ActivationShard(dims - 2, self.width, self.pieces)

    def within(self, shard: ActivationShard) -> ActivationShard:
        """What a tensor rank has of it: some of its tokens, or else all of its tokens and a part of the rest."""
        if shard.dim == 1:
            return replace(shard, pieces=self.pieces.part(shard.pieces))
        return replace(self, width=-1)  # of two dimensions at once nobody can draw a part

    def only(self, at: int) -> SequenceShard:
        """One of its pieces."""
        numbers, of = self.pieces
        return replace(self, width=self.width // len(numbers), pieces=Pieces((numbers[at],), of))


class DrawSource(Protocol):
    """What knows which draw of a forward is the next one: `SampleRNG`."""

    def next_draw(self) -> RandomDraw | None:
        """None where no forward of samples is under way."""

    def has_drawn(self) -> bool:
        """Has anything been drawn in this step?"""
