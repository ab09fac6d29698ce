"""What a run shows beside its metrics: inputs, the worst predictions, generated text and histograms."""

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
from trainer.learning.generation_request import GenerationRequest
from trainer.learning.intervals import Trigger
from trainer.learning.task import Task, TaskWrapper, unwrap_task
from trainer.parallel.compile import without_compile
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import compute_histograms
from trainer.records.sinks import Log
from trainer.strategies.parallel_model import ParallelModel

Batches = Iterable[tuple[Batch, int]]  # the micro-batches of an evaluation, and how many samples of each count


class SampleTask(TaskWrapper):
    """A task that knows which samples the next output is about.

    Only ranks that have outputs call `metrics`, so this works under every strategy.
    """

    def observe(self, batches: Batches) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of an evaluation, unchanged."""
        for batch, valid in batches:
            self._indices, self._valid = batch.indices, valid
            yield batch, valid


MAX_WORST = 10


class Prediction(NamedTuple):
    """The prediction for one sample, as `Task.mistakes` describes it."""

    sample: int  # its index in the data set
    error: float  # the larger, the worse
    said: float  # what the network predicts
    true: float


class WorstPredictionsTask(SampleTask):
    """A task that keeps the worst predictions of this rank, on the device: nothing waits for them.

    If several ranks have the same samples, several may keep the same predictions, and some none.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._worst: dict[str, Tensor] = {}  # (MAX_WORST,) each, the worst first

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        if self._valid and (mistakes := self.inner.mistakes(output, target)):
            self._keep_worst(mistakes)
        return self.inner.metrics(output, target)

    def _keep_worst(self, mistakes: dict[str, Tensor]) -> None:
        """Keep the worst of these and of those so far. ValueError if there is not one number for each sample."""
        samples = len(self._indices)
        for name in Prediction._fields[1:]:
            if name not in mistakes or mistakes[name].shape != (samples,):
                problem = f"of shape {tuple(mistakes[name].shape)}" if name in mistakes else "missing"
                kind = type(unwrap_task(self)).__name__
                raise ValueError(f"{kind}.mistakes: {name} is {problem}; expected ({samples},)")
        error = mistakes["error"].detach()  # (B,)
        # the samples of a rank have equal distances: counted on the device, because a copy would wait for it
        first, last = int(self._indices[0]), int(self._indices[-1])
        distance = (last - first) // max(samples - 1, 1) or 1
        rows = {"sample": torch.arange(first, last + 1, distance, device=error.device), **mistakes}
        if self._worst:
            rows = {name: torch.cat([self._worst[name], rows[name]]) for name in Prediction._fields}
        # stable: of equal errors the first sample comes first, on any number of ranks
        worst = rows["error"].sort(descending=True, stable=True).indices[:MAX_WORST]
        self._worst = {name: rows[name][worst] for name in Prediction._fields}

    def read(self, ranks: Ranks) -> list[Prediction]:
        """Collective: the worst predictions of all ranks, each sample once, the worst first."""
        columns = [values.tolist() for values in self._worst.values()]
        # these ranks; four numbers for each of a few samples
        gathered = ranks.all_gather_values(list(zip(*columns, strict=True)))
        predictions = {row[0]: Prediction(*row) for rows in gathered for row in rows}
        return sorted(predictions.values(), key=_worst_first)[:MAX_WORST]


def _worst_first(prediction: Prediction) -> tuple[float, int]:
    """The key to sort by. NaN is worse than any number."""
    return -inf if isnan(prediction.error) else -prediction.error, prediction.sample


class NoTextSample:
    """No text was asked for."""

    def log_text(self, model: ParallelModel, step: int) -> None:
        """The evaluation of this step is done."""


class TextSample(NoTextSample):
    """Continues the same text after each evaluation, on the main rank, which has the whole network and the sinks."""

    def __init__(self, request: GenerationRequest, data: Data, log: Log) -> None:
        self._request, self._data, self._log = request, data, log

    def log_text(self, model: ParallelModel, step: int) -> None:
        """Write the text to the sinks that show it. Training goes on as without it."""
        context = model.strategy
        if not context.world.is_main:  # the others wait in their next collective
            return
        # one token after the other: what was compiled for a step has other sizes
        with preserve_rng_state(), without_compile(), context.machine.autocast(context.device):
            self._log.sample(self._request.generate(model.network, self._data, context.device), step)


Observer = Callable[[Batches], Iterator[tuple[Batch, int]]]  # gives the micro-batches unchanged, and looks at them

MAX_INPUTS = 10  # of a batch


class NoMediaLogger:
    """No sink shows media: nothing is kept, sent or drawn."""

    def log_inputs(self, batch: Batch) -> None:
        """The first micro-batch of the run."""

    def log_parameters(self, model: ParallelModel, step: int, epochs_done: int | None) -> None:
        """Collective if it is due: weights and gradients of this step, before the optimizer changes them."""

    def record_worst(self, model: ParallelModel, view: str) -> AbstractContextManager[Observer]:
        """A context for the evaluation of a view (weights or average), which passes its micro-batches through."""
        return nullcontext(iter)

    def record_totals(self, view: str, totals: dict[str, Any]) -> None:
        """Take the totals of a view over the whole set."""

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """Collective: the evaluation is done, and its metrics count."""


class MediaLogger(NoMediaLogger):
    """Makes media for the sinks of a run. Every rank takes part; the main rank has the sinks."""

    def __init__(
        self,
        data: Data,
        eval_loader: EvalLoader | None,
        ranks: Ranks,
        log: Log,
        histogram_trigger: Trigger,
        sample: NoTextSample,
    ) -> None:
        self._data, self._eval_loader, self._ranks, self._log = data, eval_loader, ranks, log
        self._histogram_trigger, self._sample = histogram_trigger, sample
        self._worst: dict[str, WorstPredictionsTask] = {}  # by view, the prefix of its metrics
        self._confusion: dict[str, Tensor | None] = {}  # by view

    def log_inputs(self, batch: Batch) -> None:
        """Images of the main rank's first samples, with their targets."""
        inputs, targets = slice_rows((batch.inputs, batch.targets), 0, MAX_INPUTS, len(batch.indices))
        if (images := self._data.as_pictures(inputs)) is not None:  # (B, C, H, W)
            self._log.images("inputs", images, 0, self._data.as_words(targets))

    def log_parameters(self, model: ParallelModel, step: int, epochs_done: int | None) -> None:
        """Collective if it is due: histograms of trainable weights and their gradients."""
        if not self._histogram_trigger.is_due(step, epochs_done, clock_expired=False):
            return
        sizes = {name: prod(shape) for name, shape in model.shapes.items()}  # of whole tensors
        trained = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
        gradients = {name: to_local(p.grad) for name, p in trained.items() if p.grad is not None}
        weights = {name: to_local(p) for name, p in trained.items()}
        factor = model.scaler.unscale_factor()
        # all ranks, whatever each of them holds
        self._log.histograms("weights", compute_histograms(weights, sizes, 1.0, self._ranks), step)
        self._log.histograms("gradients", compute_histograms(gradients, sizes, factor, self._ranks), step)

    @contextmanager
    def record_worst(self, model: ParallelModel, view: str) -> Iterator[Observer]:
        """Inside, the task also keeps the worst predictions."""
        task = model.task
        model.task = self._worst[view] = WorstPredictionsTask(task)
        try:
            yield self._worst[view].observe
        finally:
            model.task = task

    def record_totals(self, view: str, totals: dict[str, Any]) -> None:
        """Keep the confusion matrix, if there is one."""
        self._confusion[view] = self._worst[view].confusion(totals)

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """Collective: the worst predictions of all ranks, the confusion matrix, and a text if one was asked for."""
        for view, task in self._worst.items():
            worst = task.read(self._ranks)  # all ranks; a few numbers for each of a few samples
            # only the main rank reads those samples once more: nothing collective happens there
            if worst and self._ranks.is_main:
                self._log_worst(f"{view}worst", worst, step)
            if (confusion := self._confusion[view]) is not None:
                self._log.confusion(f"{view}confusion", confusion, step, self._data.class_names)
        self._sample.log_text(model, step)

    def _log_worst(self, tag: str, worst: list[Prediction], step: int) -> None:
        """Read these few samples once more; nothing if they are no images."""
        assert self._eval_loader is not None
        samples, _, said, true = (torch.tensor(column) for column in zip(*worst, strict=True))  # (predictions,) each
        inputs, _ = self._eval_loader.read_samples(samples)
        if (images := self._data.as_pictures(inputs)) is None:
            return
        pairs = zip(self._data.as_words(said), self._data.as_words(true), strict=True)
        self._log.images(tag, images, step, [f"said {answer}\ntrue {truth}" for answer, truth in pairs])
