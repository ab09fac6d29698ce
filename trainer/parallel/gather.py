"""Rows of all data ranks, inside the methods of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks


class _Place(NamedTuple):
    """Whom to collect from; in evaluation how many rows of this rank count; in a step which samples the ranks have."""

    ranks: Ranks
    valid: int | None = None
    part: range | None = None


_place: ContextVar[_Place] = ContextVar("place", default=_Place(Ranks()))  # noqa: B039 (it holds no state)


def gather(x: Tensor) -> Tensor:
    """The rows of all data ranks for this micro-batch, differentiable; valid inside Task methods during a step.

    x: (B, ...) on every rank, result: (B · ranks, ...). Row j of rank r becomes row j · ranks + r: the samples of a
    global batch are dealt to the ranks in turn, so this is their own order. With several micro-batches the result holds
    the rows of the present one only. On one rank it is the identity.

    Where ranks have unequal shares (`loop.uneven`) the rows still come in the samples' own order; then x must have a
    row for each sample, else ValueError.
    """
    place = _place.get()
    if place.ranks.size == 1:
        return x
    if place.valid is not None:
        return _gather_valid(x, place.ranks, place.valid)
    if place.part is not None and (place.part.start % place.ranks.size or place.part.stop % place.ranks.size):
        return _GatherPart.apply(x, place.ranks, place.part)
    return _Gather.apply(x, place.ranks)


def gathering_over(ranks: Ranks, valid: int | None = None) -> AbstractContextManager[None]:
    """Within this context `gather` collects from these ranks; `valid`: an evaluation's last batch may be ragged."""
    return _within(_Place(ranks, valid))


def dealt(part: range) -> AbstractContextManager[None]:
    """Within this context the ranks have these samples of the step's global batch, dealt to them in turn."""
    return _within(_place.get()._replace(part=part))


def _within(place: _Place) -> AbstractContextManager[None]:
    """The context of a place. One rank gathers its own rows wherever it is."""
    return _At(place) if place.ranks.size > 1 else nullcontext()


class _At:
    """A class of its own, because a generator's context costs four times as much, and every micro-batch has two."""

    def __init__(self, place: _Place) -> None:
        self._here = place

    def __enter__(self) -> None:
        self._token = _place.set(self._here)

    def __exit__(self, *_: object) -> None:
        _place.reset(self._token)


def _gather_valid(x: Tensor, ranks: Ranks, valid: int) -> Tensor:
    """Rows of an evaluation batch, of which later ranks may have one less than earlier ones, or none."""
    counts = [int(count) for count in ranks.all_gather(torch.tensor([valid]))]  # data ranks; how many rows each has
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[:valid] = x[:valid]
    return torch.stack(ranks.all_gather(padded), dim=1).flatten(0, 1)[: sum(counts)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return torch.stack(ranks.all_gather(x), dim=1).flatten(0, 1)  # all data ranks; every rank's rows travel to all

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.all_reduce_sum_(total).wait()  # all data ranks; each one's loss has used my rows
        return total[ctx.ranks.rank :: ctx.ranks.size], None


class _GatherPart(torch.autograd.Function):
    """Rows of a part of the global batch that the ranks do not share equally; the first sample may be any rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, part: range) -> Tensor:
        ctx.ranks, ctx.first = ranks, part.start % ranks.size  # who has the part's first sample
        ctx.own = slice((ranks.rank - ctx.first) % ranks.size, None, ranks.size)
        own, longest = len(part[ctx.own]), -(-len(part) // ranks.size)
        if len(x) != own:
            raise ValueError(f"gather of {len(x)} rows: with loop.uneven=true each of the {own} samples must have one")
        padded = x if own == longest else torch.cat([x, x.new_zeros(longest - own, *x.shape[1:])])
        rows = ranks.all_gather(padded)  # all data ranks; every rank's rows travel to all
        return torch.stack(rows[ctx.first :] + rows[: ctx.first], dim=1).flatten(0, 1)[: len(part)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.all_reduce_sum_(total).wait()  # all data ranks; each one's loss has used my rows
        return total[ctx.own], None, None
