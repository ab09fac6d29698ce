"""The same steps by a plain loop on this process, without any strategy: is what a user has written right by itself?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.data.nested_tensors import cast_floats
from trainer.data.sampler import HugeOrder, dataset_size, make_epoch_order
from trainer.jobs.batch_sizes import evaluation_batch_size
from trainer.jobs.initial_weights import InitialWeights
from trainer.jobs.preparation import read_data_sets, seeded_network
from trainer.jobs.run_parts import PreparedRun
from trainer.learning.freezing import preserve_untrained
from trainer.learning.optimizer import init_momentum, parameter_groups, set_rates, why_not_fused
from trainer.learning.task import Task
from trainer.learning.weight_switch import make_weight_switch
from trainer.loop.progress import Progress
from trainer.parallel.batch_gather import UnreachableRanks, set_gather_ranks, set_gather_span
from trainer.parallel.batch_norm import local_batch_norms
from trainer.parallel.buckets import to_accumulator
from trainer.parallel.optimizer_state import optimizer_tensors
from trainer.parallel.ranks import Ranks
from trainer.parallel.step_counters import StepCounters
from trainer.verify.batch_parts import BatchPart, read_batch_parts
from trainer.verify.fixed_randomness import FixedRandomness
from trainer.verify.recorded_model import SketchingObserver, recording_optimizer_step
from trainer.verify.short_run import compared_batches, hide_other_processes
from trainer.verify.training_record import Key, Phase, TrainingRecord, full_tensor, sketch_rows


class Variation(NamedTuple):
    """How a plain loop differs from one over whole batches."""

    ranks: int = 1  # each global batch is divided over so many ranks
    micro_batches: int = 1  # and before that into so many micro-batches
    recreates: bool = False  # at the resume all but weights and the optimizer's memory is made anew
    frozen_norms: bool = False  # BatchNorm by its running statistics: they are somebody else's matter
    hides_processes: bool = True  # that there are other processes
    pads_together: bool = False  # these parts are cut from one batch, and not collated each by itself
    reverses: bool = False  # the parts of a batch are computed in the other order
    evaluates: bool = True  # a small evaluation after each step, as a loop does after an epoch
    reseeds: bool = False  # Python's and NumPy's generators give other numbers
    rehearses: bool = False  # a forward before the first step that leaves no trace in buffers, as strategies do


def run_plain_loop(
    run: PreparedRun, layouts: Any, start: Progress, ends: Sequence[int], last: int, variation: Variation
) -> tuple[TrainingRecord, set[str]]:
    """Train from `start` in the data to the step `last`; its record, and the generators that it used.

    ends: the step after which the run resumes, and the last one of all, with an evaluation. Random numbers are the
    same for every sample: two such loops differ in something else.
    """
    record, randomness = TrainingRecord(layouts=layouts), FixedRandomness()
    with hide_other_processes() if variation.hides_processes else nullcontext():
        loop = PlainLoop(run, variation, record, randomness)
        loop.start()
        loop.train(start, last, ends[0])
        if run.evaluation is not None and last == ends[-1]:
            loop.evaluate(last)
    return record, randomness.used_generators


@dataclass
class PlainLoop:
    """A loop in one process over whole batches, or over the parts that ranks and micro-batches would have."""

    run: PreparedRun
    variation: Variation
    record: TrainingRecord
    randomness: FixedRandomness

    def start(self) -> None:
        """Make everything as a start of the run does."""
        run = self.run = replace(self.run, **self.run.make_anew())
        run.training, run.evaluation = read_data_sets(run)
        network = seeded_network(run)
        weights = InitialWeights(run.settings.init_from, run.best_metric)
        weights.find(network)
        weights.load_into(network)
        network = network.to(torch.float64) if run.machine.resolved_precision == "fp64" else network
        self.network = network.to(run.strategy.device)
        # groups, rates and momentum as the run's own optimizer begins with them
        groups = parameter_groups(self.network, run.spare_vectors, run.rules, run.roles)
        self.optimizer = run.make_optimizer(groups)
        if why_not_fused(self.optimizer, run.make_optimizer, run.strategy.device, None):
            self.optimizer = run.make_optimizer([{**group, "fused": False} for group in groups])
        for group in self.optimizer.param_groups:
            group["lr"] *= run.schedule.scale(run.settings.loop.global_batch)
        self.switch = make_weight_switch(self.optimizer, lambda: None)
        init_momentum(self.optimizer)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        # network and task of each rank; before the hooks, which copies would call, too
        self.of_ranks = [(self.network, run.task), *(self._copy_for_rank() for _ in range(1, self.variation.ranks))]
        self.counters = StepCounters(self.network, self.run.task.plan(self.network))
        modules = chain.from_iterable(network.named_modules() for network, _ in self.of_ranks)
        self.observer = SketchingObserver(modules, Ranks(), self.record)
        self.size = dataset_size(run.training)
        self.length = len(self._order(0))
        self._set_mode(True)

    def _copy_for_rank(self) -> tuple[nn.Module, Task]:
        """Network and task of another rank, with buffers and fields of its own; the weights that learn are the same."""
        trained = {id(parameter): parameter for parameter in self.network.parameters() if parameter.requires_grad}
        fields = [field for module in self.network.modules() for field in vars(module).values()]
        # weights that are computed anew in each forward (torch.nn.utils.weight_norm)
        computed = {id(x): x.detach() for x in fields if isinstance(x, Tensor) and not x.is_leaf}
        try:
            return deepcopy((self.network, self.run.task), {**trained, **computed})
        except Exception:  # a lock, an open file: then all ranks have the same
            return self.network, self.run.task

    def train(self, progress: Progress, last: int, resume: int) -> None:
        """So many steps from here in the data; after one of them a run resumes."""
        loop = self.run.settings.loop
        if self.variation.rehearses:
            self._rehearse(self._order(0)[:2].long())
        self._record_values(0, Phase.INITIAL)
        evaluates = self.run.evaluation is not None and self.variation.evaluates
        if evaluates:  # a trial evaluation, as a run begins with one
            self.evaluate_batches([0])
        progress = replace(progress)
        while progress.step < last:
            # the samples of this step: (global batch,)
            indices = self._order(progress.epoch)[progress.position : progress.position + loop.global_batch].long()
            step, epoch = progress.step, progress.epoch
            progress.advance(loop.global_batch, self.length)
            self.step(step, epoch, indices)
            if evaluates:
                self.run.schedule.observe(self.evaluate_batches([0]), self.run.best_metric)
            if step + 1 == resume:
                if self.variation.recreates:
                    self.restart()
                self._record_values(resume, Phase.RESUME)

    def _rehearse(self, indices: Tensor) -> None:
        """A forward in training, after which buffers and what does not learn are what they were."""
        (part, *_) = self._parts(0, indices)
        with preserve_untrained(self.network), self._forward(part) as (inputs, targets):
            self.run.task.loss(self.run.task.forward(self.network, inputs, targets), targets)

    def _order(self, epoch: int) -> Tensor | HugeOrder:
        return make_epoch_order(self.run.data, self.size, self.run.settings.seed, epoch)

    def restart(self) -> None:
        """Everything anew, with the values that there were."""
        values, memory, schedule = self.network.state_dict(), self.optimizer.state_dict(), self.run.schedule.state()
        self.start()
        self.network.load_state_dict(values)
        self.optimizer.load_state_dict(memory)
        self.switch.loaded()
        self.run.schedule.load(schedule)

    def step(self, step: int, epoch: int, indices: Tensor) -> None:
        """One optimizer step over a global batch."""
        run, network = self.run, self.network
        set_rates(self.optimizer, self._rates, run.schedule(step, epoch, run.length.steps))
        self.switch.use(training=True)
        self.observer.begin(step + 1)
        self.counters.begin(*(network for network, _ in self.of_ranks))
        parts = list(self._parts(epoch, indices))[:: -1 if self.variation.reverses else 1]
        total = sum(part.weight for part in parts) or 1.0
        sums: dict[str, Tensor] = {}
        for part in parts:
            self.observer.ranks = part.rank
            network_of_rank, task = self.of_ranks[part.rank.rank]
            with self.observer.listening([part.batch]), self._forward(part) as (inputs, targets):
                losses = _loss_terms(task.loss(task.forward(network_of_rank, inputs, targets), targets))
                fraction = part.weight / total
                sums = {name: sums.get(name, 0.0) + loss.detach() * fraction for name, loss in losses.items()}
                (losses["loss"] * fraction).backward()
        for name, loss in sums.items():
            self._record(step + 1, Phase.LOSS, name, loss)
        # in the order of a backward: the last layer first
        gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        for name, gradient in reversed(gradients.items()):
            self._record(step + 1, Phase.GRADIENT, name, gradient)
        # in fp64: what differs from it is then the run's own rounding
        norm = get_total_norm([full_tensor(gradient).to("cpu", torch.float64) for gradient in gradients.values()])
        self._record(step + 1, Phase.NORM, "norm", norm)
        if run.settings.loop.max_norm is not None:
            for gradient in gradients.values():
                gradient.mul_((run.settings.loop.max_norm / (norm + 1e-6)).clamp(max=1.0))
        with self.randomness, recording_optimizer_step(network, self.optimizer, self.record, step + 1):
            self.optimizer.step()
        network.zero_grad()
        self._after_step(step + 1)
        self._record_values(step + 1, Phase.UPDATE)

    @torch.no_grad()
    def _after_step(self, step: int) -> None:
        """What the task of each rank does after a step, each with the weights as the optimizer has left them."""
        self.counters.end([network for network, _ in self.of_ranks], self.run.strategy.device)
        stepped = [parameter.clone() for parameter in self.network.parameters()] if self.variation.ranks > 1 else []
        for network, task in self.of_ranks[:0:-1]:
            task.after_step(network, step)
            # the ranks share these weights: what one task did to them the next one must not see
            for parameter, value in zip(self.network.parameters(), stepped, strict=True):
                parameter.copy_(value)
        self.run.task.after_step(self.network, step)

    def evaluate(self, step: int) -> None:
        """Record the metrics of some batches of the evaluation set."""
        width = evaluation_batch_size(self.run.settings.loop)
        for name, value in self.evaluate_batches(
            compared_batches(-(-dataset_size(self.run.evaluation) // width))
        ).items():
            self._record(step, Phase.EVALUATION, name, torch.tensor(value, dtype=torch.float64))

    def evaluate_batches(self, numbers: Sequence[int]) -> dict[str, float]:
        """The metrics of these batches of the evaluation set, as the loop would have them."""
        run, sums = self.run, dict[str, Any]()
        self._set_mode(False)
        size, width = dataset_size(run.evaluation), evaluation_batch_size(run.settings.loop)
        for at in numbers:
            for part in self._parts(0, torch.arange(size)[at * width : (at + 1) * width], training=False):
                network, task = self.of_ranks[part.rank.rank]
                with torch.no_grad(), self._forward(part) as (inputs, targets):
                    output = task.forward(network, inputs, targets)
                    loss = _loss_terms(task.loss(output, targets))["loss"]
                    counted = loss * part.weight if part.weight else torch.zeros_like(loss)  # as in the loop
                    counts = {"loss": counted, "weight": part.weight, "samples": len(part.batch.indices)}
                    for name, value in {**task.metrics(output, targets), **counts}.items():
                        sums[name] = sums.get(name, 0) + value  # int and int stay whole, as in the loop
        totals = {name: to_accumulator(value) for name, value in sums.items()}
        self._set_mode(True)
        finished = [task.finish(totals) for _, task in self.of_ranks]  # each rank asks its own task
        return {"loss": float(totals["loss"] / (totals["weight"] or 1)), **finished[0]}

    @contextmanager
    def _forward(self, part: BatchPart) -> Iterator[tuple[Any, Any]]:
        others: Any = set_gather_ranks(UnreachableRanks()) if self.variation.ranks > 1 else nullcontext()
        with (
            self.randomness,
            others,
            set_gather_span(part.batch.span),
            self.run.machine.autocast(self.run.strategy.device),
        ):
            self.randomness.begin()
            if self.variation.reseeds:
                random.seed(1)
                numpy.random.seed(1)
            yield cast_floats((part.batch.inputs, part.batch.targets), self.run.machine.parameter_dtype)

    def _parts(self, epoch: int, indices: Tensor, training: bool = True) -> Iterator[BatchPart]:
        """The parts of a global batch, as this variation divides it."""
        ranks, micro_batches = self.variation.ranks, self.variation.micro_batches
        return read_batch_parts(self.run, ranks, micro_batches, epoch, indices, training, self.variation.pads_together)

    def _set_mode(self, training: bool) -> None:
        for network, _ in self.of_ranks:
            network.train(training)
            for norm in local_batch_norms(network) if self.variation.frozen_norms else ():
                norm.eval()

    def _record_values(self, step: int, phase: str) -> None:
        self.switch.use(training=False)  # as a model is settled
        for name, tensor in (self.network.state_dict() | optimizer_tensors(self.network, self.optimizer)).items():
            self._record(step, phase, name, tensor)

    def _record(self, step: int, phase: str, name: str, tensor: Tensor) -> None:
        self.record.add(Key(step, phase, name), [0], sketch_rows(full_tensor(tensor).reshape(1, -1)))


def _loss_terms(loss: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """What is minimised, beside its parts if it has any."""
    several = loss if isinstance(loss, dict) else {"loss": loss}
    return {**several, "loss": torch.stack(list(several.values())).sum()}
