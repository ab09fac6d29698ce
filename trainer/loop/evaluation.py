"""One evaluation: the metrics of a network over a whole data set, or over some of its batches.

Around the task are, while it runs: `GatheringTask`, if the task has `gathered`; and in the trial before the first step
`ShapeCheckingTask`.
"""

from __future__ import annotations

import logging
import math
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
from trainer.messages import Refusal, did_you_mean, first_line, format_count, format_names
from trainer.parallel.batch_norm import norms_without_statistics
from trainer.parallel.ranks import Ranks, gather_exceptions
from trainer.records.metrics_reader import best_word
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel

log = logging.getLogger(__name__)

Batches = Iterable[tuple[Batch, int]]  # the micro-batches of an evaluation, and how many samples of each count
Rows = Tensor | list[Any]  # of each sample: (N, …), or a list of N
Piece = tuple[Tensor, Mapping[str, Rows]]  # of a micro-batch: the indices of its samples, and what is kept of them
Shape = tuple[int, ...]
Part = tuple[Tensor, Mapping[str, Tensor | float]]  # of a micro-batch: the indices of its samples, and its sums
Totals = tuple[dict[str, Tensor], dict[str, Rows]]  # sums over a set, and what `gathered` keeps of its samples


class NoGatheredSamples:
    """The task's metrics are made of sums: nothing is kept of a sample."""

    def observe(self, batches: Batches) -> Batches:
        """The micro-batches of an evaluation, unchanged."""
        return batches

    def read(self, strategy: Strategy) -> dict[str, Rows]:
        """Collective: what was kept of all samples, in the order of the data set."""
        return {}


class GatheringTask(TaskWrapper):
    """A task that also keeps what `Task.gathered` returns, in the host's memory.

    It knows which samples the next output is about: only ranks that have outputs call `metrics`, so this works under
    every strategy.
    """

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._task = unwrap_task(inner)
        self._pieces: list[Piece] = []

    def observe(self, batches: Batches) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of an evaluation, unchanged."""
        for batch, valid in batches:
            self._indices, self._valid = batch.indices, valid
            yield batch, valid

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        if self._valid:  # a rank without a sample of its own computes one that does not count
            self._pieces.append((self._indices, self._check_rows(self._task.gathered(output, target))))
        return self.inner.metrics(output, target)

    def _check_rows(self, rows: Mapping[str, Any]) -> dict[str, Rows]:
        """The rows on the host. ValueError if there is not one entry for each sample."""
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
        return {name: map_tensors(values, _to_host) for name, values in rows.items()}

    def read(self, strategy: Strategy) -> dict[str, Rows]:
        """Collective: the rows of all samples, in the order of the data set. ValueError if they do not fit together."""
        rank, world = strategy.data_group.rank, strategy.world
        # all ranks tell which samples they have; of several with the same samples the first one sends
        holders = world.all_gather_values(rank if self._pieces else None)
        sends = bool(self._pieces) and holders.index(rank) == world.rank
        gathered = world.all_gather_values(self._pieces if sends else [])  # all ranks; what is kept, once, to all
        pieces = [piece for of_rank in gathered for piece in of_rank]
        order = torch.cat([indices for indices, _ in pieces]).argsort()  # (N,)
        return {name: self._join_rows(name, [rows.get(name) for _, rows in pieces], order) for name in pieces[0][1]}

    def _join_rows(self, name: str, parts: Sequence[Rows | None], order: Tensor) -> Rows:
        """The rows of all micro-batches in the order of the data set."""
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


def _to_host(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


@contextmanager
def gather_samples(model: ParallelModel) -> Iterator[NoGatheredSamples | GatheringTask]:
    """Inside, the evaluation keeps what the task asks for."""
    if not gathers_samples(unwrap_task(model.task)):
        yield NoGatheredSamples()
        return
    task, model.task = model.task, (gathering := GatheringTask(model.task))
    try:
        yield gathering
    finally:
        model.task = task


class ShapeCheckingTask(TaskWrapper):
    """A task whose metrics always have the shapes that they had first; it remembers which had other ones."""

    def __init__(self, inner: Task) -> None:
        super().__init__(inner)
        self._shapes: dict[str, Shape] | None = None
        self.mismatches: dict[str, tuple[Shape, Shape]] = {}  # name → first and other shape

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        with self._explain_lists("loss", output):
            loss = self.inner.loss(output, target)
            if is_list_of_samples(loss):
                raise TypeError("it returned that list")
        return loss

    @contextmanager
    def _explain_lists(self, method: str, output: Any) -> Iterator[None]:
        """Refusal if a method fails on a list with a dict for each sample, as detection networks return."""
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
                f' if isinstance(output, dict) else output[0]["{keys[0]}"].new_zeros(()). Metrics of such lists come'
                " from gathered(output, target) and finish(totals): docs/extending.md, and the lab"
                " tests/labs/detection"
            ) from error

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        with self._explain_lists("metrics", output):
            sums = self.inner.metrics(output, target)
        if taken := sorted({"loss", "weight", "samples"}.intersection(sums)):
            raise Refusal(f"Task.metrics: {taken[0]} is the name of a sum already; give it another one")
        shapes = {name: shape_of(value) for name, value in sums.items()}
        if self._shapes is None:
            self._shapes = shapes
        if self._shapes.keys() != shapes.keys():
            raise ValueError(f"Task.metrics gave {sorted(self._shapes)}, and then {sorted(shapes)}")
        pairs = {name: (shape, shapes[name]) for name, shape in self._shapes.items()}
        self.mismatches |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        # all ranks are told later; until then a pipeline could not receive other shapes
        return {name: torch.zeros(pairs[name][0]) if name in self.mismatches else sums[name] for name in pairs}


def refuse_varying_metric_shapes(model: ParallelModel, loader: EvalLoader, ranks: Ranks) -> None:
    """Collective: Refusal if the metrics of one sample have other shapes than those of a micro-batch."""
    first_batch, _ = next(iter(loader.batches(range(1))))
    # all ranks, once: stages have other layers. These may fail on one sample, which a run need not have
    layers = [name for of_rank in gather_exceptions(ranks, norms_without_statistics(model.network)) for name in of_rank]
    smallest = loader.smallest_batch(loader.least_samples() if layers else 1)
    task, model.task = model.task, (checking := ShapeCheckingTask(model.task))
    try:
        with torch.no_grad():
            model.evaluate(first_batch, 1)
            try:
                model.evaluate(smallest, 1)
            except Exception as error:  # a user may have seen no batch of that size
                error.add_note(
                    f"This was a trial with a batch of {format_count(smallest.indices.numel(), 'sample')}, which an"
                    " evaluation may have at its end. Often a squeeze() has taken away the batch's own dimension:"
                    " squeeze(-1) takes the last one alone."
                )
                raise
    except ValueError as error:
        if not layers or "more than 1 value per channel" not in str(error):
            raise
        raise Refusal(
            f"{layers[0]} is a BatchNorm without running statistics, which needs two values of a channel, and of"
            f" {loader.size} samples in an evaluation a rank computes a micro-batch of one; another loop.eval_batch, or"
            " track_running_stats=True"
        ) from error
    finally:
        model.task = task
    mismatches = gather_exceptions(ranks, checking.mismatches)  # all ranks, once; as a rule nothing
    for name, shapes in (pair for of_rank in mismatches for pair in of_rank.items()):
        raise Refusal(f"Task.metrics: {name} {describe_shapes(*shapes)}")


def shape_of(value: Tensor | float) -> Shape:
    """The shape of a tensor; () for a number."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def describe_shapes(first: Shape, other: Shape) -> str:
    """What is wrong with two shapes of one sum, and what works."""
    return (
        f"has the shape {first} in one micro-batch and {other} in another. Metrics are added up, so they must be sums"
        " over the samples. For metrics that need every prediction (AUC, mAP) a task has gathered(output, target), see"
        " docs/extending.md"
    )


NO_MEDIA = NoMediaLogger()


def trial_evaluation(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    loader: EvalLoader,
    wanted: Mapping[str, str],
) -> None:
    """Collective: evaluate one batch, so that mistakes show now and not after an epoch.

    Refusal if the task has no metric that is wanted (key of the configuration → name, such as checkpoint.best), if it
    would be best where it is worst, or if metrics are no sums.
    """
    refuse_varying_metric_shapes(model, loader, strategy.world)
    metrics = evaluate_batches(strategy, model, task, loader, range(1))
    if taken := sorted({"kind", "time", "step", "epoch", "samples"}.intersection(metrics)):
        raise Refusal(f"Task.metrics: {taken[0]} is the name of something else in metrics.jsonl; give it another one")
    words = [best_word(metric) for metric in metrics]
    for key, name in wanted.items():
        if name in metrics and name not in words:
            raise Refusal(f"{key}={name}: the largest would be the best; {key}=-{name} takes the smallest")
        if (bare := name.removeprefix("-")) not in metrics:
            missing = bare.startswith("ema_") and not any(metric.startswith("ema_") for metric in metrics)
            hint = "; those of a moving average come with ema.decay=0.999" if missing else did_you_mean(bare, words)
            raise Refusal(f"{key}={name}: the task's metrics are {', '.join(words)}{hint}")


def evaluate_batches(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    loader: EvalLoader,
    numbers: Sequence[int],
) -> dict[str, float]:
    """Collective: metrics over the batches with these numbers, of the weights and of their average."""
    metrics: dict[str, float] = {}
    for prefix, weights in model.average.views():
        with weights:
            totals = _compute_totals(strategy, model, loader.batches(numbers))
        assert totals is not None, "nobody was asked to stop"
        metrics |= _finish_metrics(task, totals, prefix)
    return metrics


def evaluate(
    strategy: Strategy,
    model: ParallelModel,
    task: Task,
    loader: EvalLoader,
    should_stop: Callable[[], bool],
    media: NoMediaLogger = NO_MEDIA,
) -> dict[str, float] | None:
    """Collective: metrics over the whole set, of the weights and of their average; None if a rank was asked to stop.

    RuntimeError if a sample was not counted exactly once.
    """
    metrics: dict[str, float] = {}
    parts: list[Part] = []
    for prefix, weights in model.average.views():
        with weights:
            totals = _compute_totals(strategy, model, loader.batches(), should_stop, parts)
        if totals is None:
            return None
        sums, rows = totals
        if int(sums["samples"]) != loader.size:
            raise RuntimeError(f"evaluated {int(sums['samples'])} samples of a set of {loader.size}")
        metrics |= _finish_metrics(task, totals, prefix)
        media.record_totals(prefix, task, sums | rows)
    # what follows from metrics (the best, an early end, a rate) must be the same on all ranks: a task may use random
    # numbers, and tensor ranks and stages add up in different orders
    metrics = strategy.world.broadcast_value(metrics)  # all ranks, once an evaluation; the main rank's count
    if broken := [name for name, value in metrics.items() if math.isnan(value)]:
        explanation = _explain_nan(strategy.world, broken, parts)
        if strategy.world.is_main:
            log.warning("%s", explanation)
    return metrics


def _explain_nan(ranks: Ranks, metrics: Sequence[str], parts: Sequence[Part]) -> str:
    """Collective: of which samples the first sums are NaN, of each rank; or that all sums are numbers."""
    broken = [(indices, [name for name, x in sums.items() if math.isnan(x)]) for indices, sums in parts]
    found = [f"{', '.join(names)} of samples {format_names(map(str, at.tolist()), 8)}" for at, names in broken if names]
    # all ranks, only where a figure is NaN; ranks that share samples say the same
    of_ranks = ranks.all_gather_values((found[:1], len(found), len(parts)))
    where = [*dict.fromkeys(text for texts, _, _ in of_ranks for text in texts)]
    what = f"evaluation: {', '.join(metrics)} nan"
    if not where:
        return f"{what}: every sum is a number, so Task.finish has made it; has it divided 0 by 0?"
    if all(count == of for _, count, of in of_ranks):
        return f"{what}, in every micro-batch"
    return (
        f"{what}, from {'; '.join(where[:4])}. Is it a mean over nothing? Divide a sum by its count.clamp(min=1), and"
        " return the count in Task.weight"
    )


def _compute_totals(
    strategy: Strategy,
    model: ParallelModel,
    batches: Batches,
    should_stop: Callable[[], bool] | None = None,
    parts: list[Part] | None = None,
) -> Totals | None:
    """Collective: the sums over these micro-batches of all ranks, and what is kept of samples; None: asked to stop.

    parts: gets the sums of each micro-batch that are one number.
    """
    votes, stopped = strategy.votes(), False
    sums: dict[str, Tensor | float] = {}
    with torch.no_grad(), gather_samples(model) as gathered:
        for batch, valid in gathered.observe(batches):
            if should_stop is not None:
                votes.ask(should_stop())  # all ranks; it travels while the batch computes, and no GPU waits for it
            own = model.evaluate(batch, valid)
            if parts is not None:
                parts.append((batch.indices, {name: x for name, x in own.items() if not shape_of(x)}))
            _add_sums(sums, own)
            if stopped := should_stop is not None and any(votes.read()):
                break
    # at once: a network whose eval() merges weights is neither saved so, nor given its average so
    model.set_mode(training=True)
    return None if stopped else (strategy.totals(sums).read(), gathered.read(strategy))


def _add_sums(sums: dict[str, Tensor | float], parts: Mapping[str, Tensor | float]) -> None:
    """Add the sums of a micro-batch, in place."""
    for name, part in parts.items():
        before = sums.get(name, 0)
        if name in sums and shape_of(before) != shape_of(part):
            raise ValueError(f"Task.metrics: {name} {describe_shapes(shape_of(before), shape_of(part))}")
        sums[name] = before + part


def _finish_metrics(task: Task, totals: Totals, prefix: str) -> dict[str, float]:
    """The mean loss, and what the task makes of the totals, under names with this prefix."""
    sums, rows = totals
    if twice := sorted(sums.keys() & rows.keys()):
        raise Refusal(f"Task.gathered: {', '.join(twice)} is the name of a sum already; give it another one")
    loss = float(sums["loss"] / (sums["weight"] or 1))  # of nothing the mean is 0
    metrics = {"loss": loss, **task.finish(sums | rows)}
    return {prefix + name: float(value) for name, value in metrics.items()}
