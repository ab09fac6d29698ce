"""`gather`: the rows of all data ranks for a micro-batch, inside the methods of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.messages import Refusal
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.ranks import Ranks


class _Scope(NamedTuple):
    """Ranks to gather from, and which samples of a global batch they have: sample i is on rank i modulo `size`."""

    ranks: Ranks
    span: range | None = None


class UnreachableRanks(Ranks):
    """Ranks that cannot be asked: what needs the samples of others cannot be divided by hand."""

    size = 2

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Refusal: nobody is there."""
        raise Refusal("the task gathers rows of all ranks")


_ALONE = nullcontext()  # one rank gathers its own rows wherever it is
_scope: ContextVar[_Scope] = ContextVar("place", default=_Scope(Ranks()))  # noqa: B039 (it holds no state)


def gather(x: Tensor) -> Tensor:
    """The rows of all data ranks for this micro-batch, differentiable; only for methods of a Task, during a step.

    x: (B, ...) on every rank, result: (B · ranks, ...). Row j of rank r becomes row j · ranks + r. This is the order of
    the samples in the global batch. With several micro-batches the result has only the rows of the current one. On one
    rank it is the identity.

    If ranks have different numbers of samples (`loop.uneven`, the end of an evaluation), the rows are still in this
    order; then x must have one row for each sample, else ValueError.
    """
    if in_backward():
        # autograd's own threads know of no ranks: there it would be the identity, without a word
        raise ValueError(
            "gather was called in a backward, which computes a unit again (strategy.activation_checkpointing). Call it"
            " in a method of the task, on what the network returns; or leave that unit out of activation checkpointing"
        )
    place = _scope.get()
    if place.ranks.size == 1:
        return x
    span, size = place.span, place.ranks.size
    if span is None or (span.start % size == 0 and span.stop % size == 0):
        span = range(len(x) * size)  # as many samples on each rank: x may have several rows for a sample
    return _Gather.apply(x, place.ranks, span)


def set_gather_ranks(ranks: Ranks) -> AbstractContextManager[None]:
    """Within this context `gather` collects from these ranks."""
    return _SetScope(_Scope(ranks)) if ranks.size > 1 else _ALONE


def set_gather_span(span: range) -> AbstractContextManager[None]:
    """Within this context the ranks have these samples of a global batch, each the next one in turn."""
    return _SetScope(_Scope(_scope.get().ranks, span))


def current_span() -> range | None:
    """The samples of the global batch that all data ranks have of this micro-batch; None outside of a step."""
    return _scope.get().span


class _SetScope:
    """Sets the scope. A class, because a generator's context costs four times as much, and a micro-batch has two."""

    def __init__(self, place: _Scope) -> None:
        self._here = place

    def __enter__(self) -> None:
        self._token = _scope.set(self._here)

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._token)


class _Gather(torch.autograd.Function):
    """Rows of a span of samples. The first one may be any rank's, and ranks may have different numbers of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, span: range) -> Tensor:
        ctx.ranks, first = ranks, span.start % ranks.size  # who has the span's first sample: any rank may
        ctx.local = slice((ranks.rank - first) % ranks.size, None, ranks.size)  # this rank's rows in the result
        count, longest = len(span[ctx.local]), -(-len(span) // ranks.size)
        if len(x) != count and (count or len(x) > 1):  # a rank without a sample computes one that does not count
            raise ValueError(
                f"gather of {len(x)} rows: of {count} samples each must have one, because ranks have unequal shares"
            )
        # all data ranks; every rank's rows travel to all, the shorter shares filled up to the longest
        rows = ranks.all_gather(x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]))
        # (longest, ranks, ...) → (samples, ...): in turn, as they were dealt
        return torch.stack(rows[first:] + rows[:first], dim=1).flatten(0, 1)[: len(span)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.all_reduce_sum_(total).wait()  # all data ranks; each one's loss has used my rows
        return total[ctx.local], None, None
