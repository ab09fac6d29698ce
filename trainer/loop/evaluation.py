"""One evaluation: the metrics of a network over a whole set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.loader import Batch, EvalLoader
from trainer.data.nested_tensors import map_tensors
from trainer.learning.task import Task, TaskWrapper, gathers_samples, is_list_of_samples, unwrap_task
from trainer.loop.media_logging import NoMediaLogger
from trainer.messages import Refusal, did_you_mean, first_line
from trainer.parallel.ranks import Ranks
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel

Rows = Tensor | list[Any]  # of each sample: (N, …), or a list of N
Piece = tuple[Tensor, Mapping[str, Rows]]  # of a micro-batch: the numbers of its samples, and what is kept of them


class NoGatheredSamples:
    """The task's figures are made of sums: of a sample nothing is kept."""

    def through(self, batches: Iterable[tuple[Batch, int]]) -> Iterable[tuple[Batch, int]]:
        """The micro-batches of an evaluation, as they are."""
        return batches

    def read(self, strategy: Strategy) -> dict[str, Rows]:
        """Collective: of all samples, in the order of the data set."""
        return {}


class GatheringTask(NoGatheredSamples, TaskWrapper):
    """A task of which an evaluation also keeps what `gathered` gives, in the host's memory.

    Only who has outputs is asked, so it does not matter under which strategy.
    """

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._task = unwrap_task(inner)
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
        return {name: map_tensors(values, _on_host) for name, values in rows.items()}

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
def gather_samples(model: ParallelModel) -> Iterator[NoGatheredSamples]:
    """Inside, the evaluation keeps what the task asks for."""
    if not gathers_samples(unwrap_task(model.task)):
        yield NoGatheredSamples()
        return
    inner, model.task = model.task, (kept := GatheringTask(model.task))
    try:
        yield kept
    finally:
        model.task = inner


Shape = tuple[int, ...]


class ShapeCheckingTask(TaskWrapper):
    """A task whose metrics keep the shapes that they have first; it remembers which ones would have had others."""

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._shapes: dict[str, Shape] | None = None
        self.differing: dict[str, tuple[Shape, Shape]] = {}

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        with self._lists_explained("loss", output):
            loss = self.inner.loss(output, target)
            if is_list_of_samples(loss):
                raise TypeError("it returned that list")
        return loss

    @contextmanager
    def _lists_explained(self, method: str, output: Any) -> Iterator[None]:
        """Refusal where a method fails on a list with a dict for each sample, as detection networks give."""
        try:
            yield
        except Exception as error:
            if not is_list_of_samples(output):
                raise
            keys = [str(key) for key in output[0]]
            raise Refusal(
                f"{type(unwrap_task(self)).__name__}.{method} fails in an evaluation ({type(error).__name__}:"
                f" {first_line(error)}): there the network's output is a list with a dict for each sample"
                f" ({', '.join(keys)}), and no loss. Write for example: def loss(self, output, target): return output"
                f' if isinstance(output, dict) else output[0]["{keys[0]}"].new_zeros(()). Figures of such lists come'
                " from gathered(output, target) and finish(totals): docs/extending.md, and the lab"
                " tests/labs/detection"
            ) from error

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        with self._lists_explained("metrics", output):
            sums = self.inner.metrics(output, target)
        shapes = {name: shape_of(value) for name, value in sums.items()}
        if self._shapes is None:
            self._shapes = shapes
        if self._shapes.keys() != shapes.keys():
            raise ValueError(f"Task.metrics gave {sorted(self._shapes)}, and then {sorted(shapes)}")
        pairs = {name: (shape, shapes[name]) for name, shape in self._shapes.items()}
        self.differing |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        # until all ranks have been told: of a pipeline nobody could receive other shapes
        return {name: torch.zeros(pairs[name][0]) if name in self.differing else sums[name] for name in pairs}


def refuse_metrics(model: ParallelModel, stream: EvalLoader, ranks: Ranks) -> None:
    """Collective: Refusal where the metrics of one sample have another shape than those of a micro-batch."""
    whole, _ = next(iter(stream.batches(range(1))))
    inner, model.task = model.task, (task := ShapeCheckingTask(model.task))
    try:
        with torch.no_grad():
            for batch in (whole, stream.smallest_batch()):
                model.evaluate(batch, 1)
    finally:
        model.task = inner
    heard = ranks.all_gather_values(task.differing)  # all ranks, once; as a rule nothing
    for name, shapes in (pair for rank in heard for pair in rank.items()):
        raise Refusal(f"Task.metrics: {name} {describe_shapes(*shapes)}")


def shape_of(value: Tensor | float) -> Shape:
    """Of a number it is ()."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def describe_shapes(first: Shape, other: Shape) -> str:
    """What is wrong with two shapes of one sum, and what works."""
    return (
        f"has the shape {first} in one micro-batch and {other} in another. Metrics are added up, so they must be sums"
        " over the samples. For figures that need every prediction (AUC, mAP) a task has gathered(output, target), see"
        " docs/extending.md"
    )


NO_MEDIA = NoMediaLogger()


def trial_evaluation(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    stream: EvalLoader,
    wanted: Mapping[str, str],
    show: NoMediaLogger = NO_MEDIA,
) -> None:
    """Collective: evaluate one batch, so that what is wrong there shows now and not after an epoch.

    Refusal where a wanted figure, by the key that names it (checkpoint.best), is none of the task's; or where metrics
    are no sums.
    """
    refuse_metrics(model, stream, strategy.world)
    figures = evaluate_batches(strategy, model, task, stream, range(1), show)
    for key, name in wanted.items():
        if (bare := name.removeprefix("-")) not in figures:
            averaged = bare.startswith("ema_") and not any(each.startswith("ema_") for each in figures)
            hint = "; those of a moving average come with ema.decay=0.999" if averaged else did_you_mean(bare, figures)
            raise Refusal(f"{key}={name}: the task's metrics are {', '.join(figures)}{hint}")


def evaluate_batches(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    stream: EvalLoader,
    at: Sequence[int],
    show: NoMediaLogger = NO_MEDIA,
) -> dict[str, float]:
    """Collective: figures over some batches of a set, by their numbers."""
    figures: dict[str, float] = {}
    for prefix, weights in model.average.views():
        sums: dict[str, Tensor | float] = {}
        with weights, torch.no_grad(), show.record_worst(model, prefix) as through, gather_samples(model) as kept:
            for batch, valid in kept.through(through(stream.batches(at))):
                _add_sums(sums, model.evaluate(batch, valid))
        figures |= _finish_metrics(task, strategy.totals(sums).read(), kept.read(strategy), prefix)
    return figures


def evaluate(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    stream: EvalLoader,
    asked: Callable[[], bool],
    show: NoMediaLogger = NO_MEDIA,
) -> dict[str, float] | None:
    """Collective: figures over the whole set, every sample counted once; None where a rank was asked to stop.

    Those of the weights, and of their moving average where there is one. RuntimeError where a sample was not counted
    once.
    """
    figures: dict[str, float] = {}
    votes = strategy.votes()
    for prefix, weights in model.average.views():
        sums: dict[str, Tensor | float] = {}
        with weights, torch.no_grad(), show.record_worst(model, prefix) as through, gather_samples(model) as kept:
            for batch, valid in kept.through(through(stream.batches())):
                votes.ask(asked())  # travels while the batch computes; no GPU waits for it
                _add_sums(sums, model.evaluate(batch, valid))
                if any(votes.read()):
                    return None
        totals = strategy.totals(sums).read()
        if int(totals["samples"]) != stream.size:
            raise RuntimeError(f"evaluated {int(totals['samples'])} samples of a set of {stream.size}")
        rows = kept.read(strategy)
        figures |= _finish_metrics(task, totals, rows, prefix)
        show.record_totals(prefix, totals | rows)
    # what follows from them (the best, an early end, a rate) all must do alike: a task may draw at random, and tensor
    # ranks and stages add up each for themselves, in an order of their own
    return strategy.world.all_gather_values(figures)[0]  # all ranks, once an evaluation; the main rank's


def _add_sums(sums: dict[str, Tensor | float], parts: Mapping[str, Tensor | float]) -> None:
    for name, part in parts.items():
        if name in sums and shape_of(sums[name]) != shape_of(part):
            raise ValueError(f"Task.metrics: {name} {describe_shapes(shape_of(sums[name]), shape_of(part))}")
        sums[name] = sums[name] + part if name in sums else part


def _finish_metrics(task: Task, totals: dict[str, Tensor], rows: dict[str, Rows], prefix: str) -> dict[str, float]:
    """The mean loss, and what the task makes of the totals, under names with this prefix."""
    if twice := sorted(totals.keys() & rows.keys()):
        raise Refusal(f"Task.gathered: {', '.join(twice)} is the name of a sum already; give it another one")
    loss = float(totals["loss"] / (totals["weight"] or 1))  # of nothing the mean is 0
    figures = {"loss": loss, **task.finish(totals | rows)}
    return {prefix + name: float(value) for name, value in figures.items()}
