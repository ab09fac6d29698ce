"""What a task keeps of every sample of an evaluation, for figures that are no sums: the whole set, in its order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.nested_tensors import changed
from trainer.data.stream import Batch
from trainer.learning.task import Around, Task, gathers, innermost
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import Placed

Rows = Tensor | list[Any]  # of each sample: (N, …), or a list of N
Piece = tuple[Tensor, Mapping[str, Rows]]  # of a micro-batch: the numbers of its samples, and what is kept of them


class NothingKept:
    """The task's figures are made of sums: of a sample nothing is kept."""

    def through(self, batches: Iterable[tuple[Batch, int]]) -> Iterable[tuple[Batch, int]]:
        """The micro-batches of an evaluation, as they are."""
        return batches

    def read(self, strategy: Strategy) -> dict[str, Rows]:
        """Collective: of all samples, in the order of the data set."""
        return {}


class Kept(NothingKept, Around):
    """A task of which an evaluation also keeps what `gathered` gives, in the host's memory.

    Only who has outputs is asked, so it does not matter under which strategy.
    """

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._task = innermost(inner)
        self._pieces: list[Piece] = []

    def through(self, batches: Iterable[tuple[Batch, int]]) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of an evaluation, as they are: which samples the next outputs are about."""
        for batch, valid in batches:
            self._indices, self._valid = batch.indices, valid
            yield batch, valid

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        if self._valid:  # a rank without a sample of its own computes one that does not count
            self._pieces.append((self._indices, self._checked(self._task.gathered(output, target))))
        return self.inner.metrics(output, target)

    def _checked(self, rows: Mapping[str, Any]) -> dict[str, Rows]:
        """On the host. ValueError where there is not one entry for each sample."""
        rows = {name: list(values) if isinstance(values, tuple) else values for name, values in rows.items()}
        for name, values in rows.items():
            size = len(values) if isinstance(values, list) or (isinstance(values, Tensor) and values.dim()) else None
            if size != len(self._indices):
                what = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
                what += f" of {size}" if isinstance(values, list) else ""
                raise ValueError(
                    f"{type(self._task).__name__}.gathered: {name} is {what} for {len(self._indices)} samples; it must"
                    " be a tensor whose first dimension is the samples, or a list with an entry for each"
                )
        return {name: changed(values, _on_host) for name, values in rows.items()}

    def read(self, strategy: Strategy) -> dict[str, Rows]:
        """Collective: of all samples, in the order of the data set. ValueError where pieces do not fit together."""
        # all ranks; whose samples each has, because of those that have the same ones, one sends
        holders = strategy.world.all_gather_values(strategy.data_group.rank if self._pieces else None)
        sends = bool(self._pieces) and holders.index(strategy.data_group.rank) == strategy.world.rank
        heard = strategy.world.all_gather_values(self._pieces if sends else [])  # all ranks; what is kept, once, to all
        pieces = [piece for rank in heard for piece in rank]
        order = torch.cat([indices for indices, _ in pieces]).argsort()
        return {name: self._joined(name, [rows.get(name) for _, rows in pieces], order) for name in pieces[0][1]}

    def _joined(self, name: str, parts: Sequence[Rows | None], order: Tensor) -> Rows:
        if all(isinstance(part, list) for part in parts):
            entries = [entry for part in parts if part is not None for entry in part]
            return [entries[at] for at in order.tolist()]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        shapes = {tuple(part.shape[1:]) for part in tensors}
        if len(tensors) < len(parts) or len(shapes) > 1:
            what = " and ".join(str(("B", *shape)).replace("'", "") for shape in sorted(shapes)[:2])
            raise ValueError(
                f"{type(self._task).__name__}.gathered: {name} changes from micro-batch to micro-batch: {what}; pad it"
                " to one shape, or give a list with a tensor for each sample"
            )
        return torch.cat(tensors).index_select(0, order)


def _on_host(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


@contextmanager
def keeping(placed: Placed) -> Iterator[NothingKept]:
    """Inside, the evaluation keeps what the task asks for."""
    if not gathers(innermost(placed.task)):
        yield NothingKept()
        return
    inner, placed.task = placed.task, (kept := Kept(placed.task))
    try:
        yield kept
    finally:
        placed.task = inner
