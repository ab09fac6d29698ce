"""What people look at of a run beside its metrics: inputs, the worst answers, texts and histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf, isnan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.loader import Batch, EvalLoader
from trainer.data.nested_tensors import slice_rows
from trainer.data.rng import preserve_rng_state
from trainer.learning.intervals import Trigger
from trainer.learning.task import Task, TaskWrapper, unwrap_task
from trainer.learning.text_generation import GenerationRequest
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import compute_histograms
from trainer.parallel.units import without_compile
from trainer.records.sinks import Log
from trainer.strategies.parallel_model import ParallelModel

MAX_WORST = 10


class Prediction(NamedTuple):
    """One answer."""

    sample: int  # its number in the set
    error: float  # the larger, the worse
    said: float
    true: float


class WorstPredictionsTask(TaskWrapper):
    """A task of which an evaluation also leaves the worst answers of this rank, on the device: nothing waits for them.

    Only who has outputs is asked for metrics, so it does not matter under which strategy: of ranks that have the same
    samples several may keep the same answers, and some none.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._kept: dict[str, Tensor] = {}  # (KEPT,) each, the worst first

    def through(self, batches: Iterable[tuple[Batch, int]]) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of an evaluation, as they are: which samples the next answers are about."""
        for batch, valid in batches:
            self._indices, self._valid = batch.indices, valid
            yield batch, valid

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        if self._valid and (found := self.inner.mistakes(output, target)):
            self._keep(found)
        return self.inner.metrics(output, target)

    def _keep(self, found: dict[str, Tensor]) -> None:
        """Of the worst so far and these the worst. ValueError where there is not one answer a sample."""
        samples = len(self._indices)
        for name in Prediction._fields[1:]:
            if name not in found or found[name].shape != (samples,):
                said = f"of shape {tuple(found[name].shape)}" if name in found else "missing"
                raise ValueError(
                    f"{type(unwrap_task(self)).__name__}.mistakes: {name} is {said}; expected ({samples},)"
                )
        error = found["error"].detach()
        # the samples of a rank lie equally far apart: they are counted on the device, for a copy would wait for it
        first, last = int(self._indices[0]), int(self._indices[-1])
        apart = (last - first) // max(samples - 1, 1) or 1
        rows = {"sample": torch.arange(first, last + 1, apart, device=error.device), **found}
        rows = {
            name: torch.cat([self._kept[name], rows[name]]) if self._kept else rows[name] for name in Prediction._fields
        }
        # stable: of equal errors the first sample comes first, on any number of ranks
        worst = rows["error"].sort(descending=True, stable=True).indices[:MAX_WORST]
        self._kept = {name: values[worst] for name, values in rows.items()}

    def read(self, ranks: Ranks) -> list[Prediction]:
        """Collective: the worst answers of all ranks, each sample once, the worst first."""
        own = [values.tolist() for values in self._kept.values()]
        # these ranks; four numbers for each of a few samples
        heard = ranks.all_gather_values(list(zip(*own, strict=True)))
        known = {mistake.sample: mistake for rank in heard for mistake in map(Prediction._make, rank)}
        # not a number is worse than any
        return sorted(known.values(), key=lambda one: (-inf if isnan(one.error) else -one.error, one.sample))[
            :MAX_WORST
        ]


class NoTextSample:
    """Nobody asked for one."""

    def log_text(self, model: ParallelModel, step: int) -> None:
        """The evaluation of this step is done."""


class TextSample(NoTextSample):
    """Continues one text again and again, on the main rank, which has the whole network and the sinks."""

    def __init__(self, asked: GenerationRequest, data: Data, log: Log) -> None:
        self._asked, self._data, self._log = asked, data, log

    def log_text(self, model: ParallelModel, step: int) -> None:
        """Write the text, for the sinks that show it; training goes on as if nobody had."""
        place = model.strategy
        if not place.world.is_main:  # the others wait for it where they next meet
            return
        # one token after the other: nothing that was compiled for a step has these sizes
        with preserve_rng_state(), without_compile(), place.machine.autocast(place.device):
            self._log.sample(self._asked.generate(model.network, self._data, place.device), step)


BatchObserver = Callable[
    [Iterable[tuple[Batch, int]]], Iterator[tuple[Batch, int]]
]  # micro-batches as they are, looked at

MAX_INPUTS = 10  # of a batch


class NoMediaLogger:
    """Nobody looks: nothing is kept, gathered or drawn."""

    def log_inputs(self, batch: Batch) -> None:
        """The first micro-batch of all."""

    def log_parameters(self, model: ParallelModel, step: int, epochs_done: int | None) -> None:
        """Collective where it is due: weights and gradients of this step, before the weights change."""

    def record_worst(self, model: ParallelModel, view: str) -> AbstractContextManager[BatchObserver]:
        """Inside, an evaluation of this view goes through its micro-batches."""
        return nullcontext(iter)

    def record_totals(self, view: str, totals: dict[str, Any]) -> None:
        """What the evaluation of this view has summed up over the whole set."""

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """Collective: the evaluation is done, and its figures count."""


class MediaLogger(NoMediaLogger):
    """Makes all that for the sinks of a run; every rank of it takes part, the main one has the sinks."""

    def __init__(
        self,
        data: Data,
        evaluation: EvalLoader | None,
        ranks: Ranks,
        log: Log,
        due: Trigger,
        sample: NoTextSample,
    ) -> None:
        self._data, self._evaluation, self._ranks, self._log, self._due = data, evaluation, ranks, log, due
        self._sample = sample
        self._watched: dict[str, WorstPredictionsTask] = {}  # by the prefix of a view's figures
        self._confusion: dict[str, Tensor | None] = {}

    def log_inputs(self, batch: Batch) -> None:
        """Pictures of the main rank's first samples, with what is true of them."""
        inputs, targets = slice_rows((batch.inputs, batch.targets), 0, MAX_INPUTS, len(batch.indices))
        if (pictures := self._data.as_pictures(inputs)) is not None:
            self._log.images("inputs", pictures, 0, self._data.as_words(targets))

    def log_parameters(self, model: ParallelModel, step: int, epochs_done: int | None) -> None:
        """Collective where it is due: histograms of what is trained."""
        if not self._due.is_due(step, epochs_done, clock_expired=False):
            return
        sizes = {name: prod(shape) for name, shape in model.shapes.items()}
        trained = {name: one for name, one in model.network.named_parameters() if one.requires_grad}
        gradients = {name: to_local(one.grad) for name, one in trained.items() if one.grad is not None}
        weights = {name: to_local(one) for name, one in trained.items()}
        # all ranks, whatever each holds
        self._log.histograms("weights", compute_histograms(weights, sizes, 1.0, self._ranks), step)
        self._log.histograms(
            "gradients", compute_histograms(gradients, sizes, model.scaler.unscale_factor(), self._ranks), step
        )

    @contextmanager
    def record_worst(self, model: ParallelModel, view: str) -> Iterator[BatchObserver]:
        """Inside, the task also keeps the worst answers."""
        task = model.task
        model.task = self._watched[view] = WorstPredictionsTask(task)
        try:
            yield self._watched[view].through
        finally:
            model.task = task

    def record_totals(self, view: str, totals: dict[str, Any]) -> None:
        """Keep the confusion matrix, if there is one."""
        self._confusion[view] = self._watched[view].confusion(totals)

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """Collective: show the worst answers of all ranks, the confusion matrix, and a text where one is asked for."""
        for view, watched in self._watched.items():
            worst = watched.read(self._ranks)  # all ranks; a few numbers for each of a few samples
            # the one thing here that not all ranks do: reading those samples once more
            if worst and self._ranks.is_main:
                self._log_worst(f"{view}worst", worst, step)
            if (confusion := self._confusion[view]) is not None:
                self._log.confusion(f"{view}confusion", confusion, step, self._data.class_names)
        self._sample.log_text(model, step)

    def _log_worst(self, tag: str, worst: list[Prediction], step: int) -> None:
        """Read these few samples once more; nothing if they are no pictures."""
        assert self._evaluation is not None
        inputs, _ = self._evaluation.read_samples(torch.tensor([one.sample for one in worst]))
        if (pictures := self._data.as_pictures(inputs)) is None:
            return
        said = self._data.as_words(torch.tensor([one.said for one in worst]))
        true = self._data.as_words(torch.tensor([one.true for one in worst]))
        words = [f"said {answer}\ntrue {truth}" for answer, truth in zip(said, true, strict=True)]
        self._log.images(tag, pictures, step, words)
