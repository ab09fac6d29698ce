"""What people look at of a run beside its figures: inputs, an evaluation's worst answers and confusion, histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.nested_tensors import rows
from trainer.data.stream import Batch, EvaluationStream
from trainer.learning.cadence import Due
from trainer.loop.text_samples import NoSample
from trainer.parallel.histograms import histograms
from trainer.parallel.local_shard import held
from trainer.parallel.ranks import Ranks
from trainer.records.sinks import Log
from trainer.records.worst_samples import Mistake, Watched
from trainer.strategies.parallel_model import Placed

Through = Callable[[Iterable[tuple[Batch, int]]], Iterator[tuple[Batch, int]]]  # micro-batches as they are, looked at

_INPUTS = 10  # of a batch


class NoShow:
    """Nobody looks: nothing is kept, gathered or drawn."""

    def inputs(self, batch: Batch) -> None:
        """The first micro-batch of all."""

    def parameters(self, placed: Placed, step: int, epochs_done: int | None) -> None:
        """Collective where it is due: weights and gradients of this step, before the weights change."""

    def watching(self, placed: Placed, view: str) -> AbstractContextManager[Through]:
        """Inside, an evaluation of this view goes through its micro-batches."""
        return nullcontext(iter)

    def totals(self, view: str, totals: dict[str, Any]) -> None:
        """What the evaluation of this view has summed up over the whole set."""

    def evaluation(self, placed: Placed, step: int) -> None:
        """Collective: the evaluation is done, and its figures count."""


class Show(NoShow):
    """Makes all that for the sinks of a run; every rank of it takes part, the main one has the sinks."""

    def __init__(
        self,
        data: Data,
        evaluation: EvaluationStream | None,
        ranks: Ranks,
        log: Log,
        due: Due,
        sample: NoSample,
    ) -> None:
        self._data, self._evaluation, self._ranks, self._log, self._due = data, evaluation, ranks, log, due
        self._sample = sample
        self._watched: dict[str, Watched] = {}  # by the prefix of a view's figures
        self._confusion: dict[str, Tensor | None] = {}

    def inputs(self, batch: Batch) -> None:
        """Pictures of the main rank's first samples, with what is true of them."""
        inputs, targets = rows((batch.inputs, batch.targets), 0, _INPUTS, len(batch.indices))
        if (pictures := self._data.as_pictures(inputs)) is not None:
            self._log.images("inputs", pictures, 0, self._data.as_words(targets))

    def parameters(self, placed: Placed, step: int, epochs_done: int | None) -> None:
        """Collective where it is due: histograms of what is trained."""
        if not self._due.now(step, epochs_done, clock=False):
            return
        sizes = {name: prod(shape) for name, shape in placed.shapes.items()}
        trained = {name: one for name, one in placed.network.named_parameters() if one.requires_grad}
        gradients = {name: held(one.grad) for name, one in trained.items() if one.grad is not None}
        weights = {name: held(one) for name, one in trained.items()}
        # all ranks, whatever each holds
        self._log.histograms("weights", histograms(weights, sizes, 1.0, self._ranks), step)
        self._log.histograms("gradients", histograms(gradients, sizes, placed.scaler.unscaled(), self._ranks), step)

    @contextmanager
    def watching(self, placed: Placed, view: str) -> Iterator[Through]:
        """Inside, the task also keeps the worst answers."""
        task = placed.task
        placed.task = self._watched[view] = Watched(task)
        try:
            yield self._watched[view].through
        finally:
            placed.task = task

    def totals(self, view: str, totals: dict[str, Any]) -> None:
        """Keep the confusion matrix, if there is one."""
        self._confusion[view] = self._watched[view].confusion(totals)

    def evaluation(self, placed: Placed, step: int) -> None:
        """Collective: show the worst answers of all ranks, the confusion matrix, and a text where one is asked for."""
        for view, watched in self._watched.items():
            worst = watched.read(self._ranks)  # all ranks; a few numbers for each of a few samples
            # the one thing here that not all ranks do: reading those samples once more
            if worst and self._ranks.is_main:
                self._show_worst(f"{view}worst", worst, step)
            if (confusion := self._confusion[view]) is not None:
                self._log.confusion(f"{view}confusion", confusion, step, self._data.class_names)
        self._sample.show(placed, step)

    def _show_worst(self, tag: str, worst: list[Mistake], step: int) -> None:
        """Read these few samples once more; nothing if they are no pictures."""
        assert self._evaluation is not None
        inputs, _ = self._evaluation.some(torch.tensor([one.sample for one in worst]))
        if (pictures := self._data.as_pictures(inputs)) is None:
            return
        said = self._data.as_words(torch.tensor([one.said for one in worst]))
        true = self._data.as_words(torch.tensor([one.true for one in worst]))
        words = [f"said {answer}\ntrue {truth}" for answer, truth in zip(said, true, strict=True)]
        self._log.images(tag, pictures, step, words)
