"""What a run shows beside its metrics: inputs, a confusion matrix, generated text and histograms."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from trainer.data.data import Data
from trainer.data.loader import Batch
from trainer.data.nested_tensors import slice_rows
from trainer.data.rng import preserve_rng_state
from trainer.learning.generation_request import GenerationRequest
from trainer.learning.intervals import Trigger
from trainer.learning.task import Task
from trainer.parallel.compile import without_compile
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import compute_histograms
from trainer.records.sinks import Log
from trainer.strategies.parallel_model import ParallelModel


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


MAX_INPUTS = 10  # of a batch


class NoMediaLogger:
    """No sink shows media: nothing is kept, sent or drawn."""

    def log_inputs(self, batch: Batch) -> None:
        """The first micro-batch of the run."""

    def log_parameters(self, model: ParallelModel, step: int, epochs_done: int | None) -> None:
        """Collective if it is due: weights and gradients of this step, before the optimizer changes them."""

    def record_totals(self, view: str, task: Task, totals: dict[str, Any]) -> None:
        """Take the totals of a view (weights or average) over the whole set."""

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """The evaluation is done, and its metrics count."""


class MediaLogger(NoMediaLogger):
    """Makes media for the sinks of a run. Every rank takes part; the main rank has the sinks."""

    def __init__(self, data: Data, ranks: Ranks, log: Log, histogram_trigger: Trigger, sample: NoTextSample) -> None:
        self._data, self._ranks, self._log = data, ranks, log
        self._histogram_trigger, self._sample = histogram_trigger, sample
        self._confusion: dict[str, Tensor | None] = {}  # by view, the prefix of its metrics

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

    def record_totals(self, view: str, task: Task, totals: dict[str, Any]) -> None:
        """Keep the confusion matrix, if there is one."""
        self._confusion[view] = task.confusion(totals)

    def log_evaluation(self, model: ParallelModel, step: int) -> None:
        """The confusion matrix, and a text if one was asked for."""
        for view, confusion in self._confusion.items():
            if confusion is not None:
                self._log.confusion(f"{view}confusion", confusion, step, self._data.class_names)
        self._sample.log_text(model, step)
