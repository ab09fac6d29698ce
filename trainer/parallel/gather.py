"""Rows of all data ranks, inside the methods of a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks


@dataclass(frozen=True)
class _Place:
    """Whom to collect from; in evaluation also how many rows of this rank count."""

    ranks: Ranks
    valid: int | None = None


_place: ContextVar[_Place] = ContextVar("place", default=_Place(Ranks()))  # noqa: B039 (it holds no state)


def gather(x: Tensor) -> Tensor:
    """The rows of all data ranks for this micro-batch, differentiable; valid inside Task methods during a step.

    x: (B, ...) on every rank, result: (B · ranks, ...). Row j of rank r becomes row j · ranks + r: the samples of a
    global batch are dealt to the ranks in turn, so this is their own order. With several micro-batches the result holds
    the rows of the present one only. On one rank it is the identity.
    """
    place = _place.get()
    if place.ranks.size == 1:
        return x
    return _Gather.apply(x, place.ranks) if place.valid is None else _gather_valid(x, place.ranks, place.valid)


@contextmanager
def gathering_over(ranks: Ranks, valid: int | None = None) -> Iterator[None]:
    """Within this context `gather` collects from these ranks; `valid`: an evaluation's last batch may be ragged."""
    token = _place.set(_Place(ranks, valid))
    try:
        yield
    finally:
        _place.reset(token)


def _gather_valid(x: Tensor, ranks: Ranks, valid: int) -> Tensor:
    """Rows of an evaluation batch, of which later ranks may have one less than earlier ones, or none."""
    counts = [int(count) for count in ranks.gather(torch.tensor([valid]))]  # data ranks; how many rows each has
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[:valid] = x[:valid]
    return torch.stack(ranks.gather(padded), dim=1).flatten(0, 1)[: sum(counts)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return torch.stack(ranks.gather(x), dim=1).flatten(0, 1)  # all data ranks; every rank's rows travel to all

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.sum_(total).wait()  # all data ranks; each one's loss has used my rows
        return total[ctx.ranks.rank :: ctx.ranks.size], None
