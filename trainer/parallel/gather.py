"""Rows of all data ranks, inside the methods of a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks

_data_ranks: ContextVar[Ranks] = ContextVar("data_ranks", default=Ranks())  # noqa: B039 (it holds no state)


def gather(x: Tensor) -> Tensor:
    """The rows of all data ranks for this micro-batch, differentiable; valid inside Task methods during a step.

    x: (B, ...) on every rank, result: (B · ranks, ...). Row j of rank r becomes row j · ranks + r: the samples of a global
    batch are dealt to the ranks in turn, so this is their own order. With several micro-batches the result holds the rows
    of the present one only. On one rank it is the identity.
    """
    ranks = _data_ranks.get()
    return x if ranks.size == 1 else _Gather.apply(x, ranks)


@contextmanager
def gathering_over(ranks: Ranks) -> Iterator[None]:
    """Within this context `gather` collects from these ranks."""
    token = _data_ranks.set(ranks)
    try:
        yield
    finally:
        _data_ranks.reset(token)


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
