"""The outputs of a network for each sample of a set, brought to the main rank batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.jobs.trained_run import LoadedRun
from trainer.learning.task import Task
from trainer.parallel.ranks import Ranks
from trainer.strategies.base import Strategy

Rows = dict[str, NDArray[Any]]  # named rows (n, …) of neighbouring samples; of objects where they differ in shape
Keep = Callable[[Any, Any], dict[str, Tensor]]  # (output, target) → what is kept of them, the samples first


class Stopped(Exception):
    """A rank was asked to stop, and all of them have."""


def gather_outputs(strategy: Strategy, loaded: LoadedRun, keep: Keep, dtype: torch.dtype) -> Iterator[tuple[int, Rows]]:
    """Collective: for each micro-batch, in the order of the set, its first sample and the rows of all its samples.

    On the main rank; on the others the rows are none. Floating-point numbers as `dtype`. Stopped where a rank was asked
    to stop.
    """
    task = loaded.model.task = _RowKeeper(keep)
    # votes: is any rank asked to stop? They travel while a batch is computed
    votes, senders = strategy.votes(), set[int]()
    for batch, valid in loaded.loader.batches():
        votes.ask(loaded.stop.raised)
        task.rows = {}
        loaded.model.evaluate(batch, valid)
        # known after the first batch: a pipeline has outputs on its last stage alone
        senders = senders or _senders(strategy.world, strategy.slice.rank, bool(task.rows))
        rows: Rows = {}
        if valid and strategy.world.rank in senders:
            rows = {"index": batch.indices.numpy()} | {name: _to_numpy(x, dtype) for name, x in task.rows.items()}
        # all ranks; to the main one the rows of the data ranks, each once, from those that have outputs
        pieces = [piece for piece in strategy.world.gather_values(rows) if piece]
        yield _join_rows(pieces, len(batch.span)) if strategy.world.is_main else (0, {})
        if any(votes.read()):
            raise Stopped


def _senders(world: Ranks, data_rank: int, has_outputs: bool) -> set[int]:
    """Collective: of the ranks that have the outputs of the same samples one, so that no row travels twice."""
    holders: dict[int, int] = {}
    every = world.all_gather_values((data_rank, has_outputs))  # all ranks, once; two numbers each
    for rank, (its_data_rank, has) in enumerate(every):
        if has:  # the first of each data rank
            holders.setdefault(its_data_rank, rank)
    return set(holders.values())


def _to_numpy(rows: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    return (rows.to(dtype) if rows.is_floating_point() else rows).detach().cpu().numpy()


def _join_rows(pieces: list[Rows], samples: int) -> tuple[int, Rows]:
    """The rows of all ranks in the order of the set."""
    whole = {name: _concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    # (rows of all ranks,) → their places in the set
    order = numpy.argsort(whole.pop("index"), kind="stable")
    if len(order) != samples:
        raise RuntimeError(f"{len(order)} rows came of {samples} samples")
    first = min(int(piece["index"].min()) for piece in pieces)
    return first, {name: rows[order] for name, rows in whole.items()}


def _concatenate(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The rows of several ranks; where they differ in shape, an array of rows as objects."""
    if len({part.shape[1:] for part in parts}) == 1:
        return numpy.concatenate(parts)
    rows = [row for part in parts for row in part]
    whole = numpy.empty(len(rows), dtype=object)
    whole[:] = rows
    return whole


class _RowKeeper(Task):
    """A task of which an evaluation keeps rows on this rank: only who has outputs is asked for metrics."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.rows: dict[str, Tensor] = {}

    def loss(self, output: Any, target: Any) -> Tensor:
        return torch.zeros(())  # not used, but an evaluation adds it up

    def weight(self, target: Any) -> int:
        return 1

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        self.rows = self._keep(output, target)
        return {}
