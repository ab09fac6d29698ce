"""A step of one rank, tried without values: what it holds, sends and computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.nested_tensors import map_tensors, slice_rows
from trainer.data.sampler import RankSampler, dataset_size
from trainer.jobs.batch_sizes import BatchSizes, evaluation_batch_size
from trainer.jobs.plan.devices import DEVICES, Device
from trainer.jobs.plan.fake_mode import FakeRunMode, make_network, torch_without_values
from trainer.jobs.plan.forks import run_forked
from trainer.jobs.plan.host_memory import CountedCopies
from trainer.jobs.plan.ledger import Ledger, Peak
from trainer.jobs.plan.roofline import Roofline
from trainer.jobs.plan.traffic import Collective, Traffic
from trainer.jobs.preparation import prepare_network
from trainer.jobs.run_parts import RunParts
from trainer.learning.optimizer import parameter_groups
from trainer.messages import Refusal, first_line
from trainer.parallel.fake_group import FakeGroup, NotYetSent
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel

# Micro-batches of a step that is tried whole. Of more, two and three are tried: all in the middle are alike.
MOST_MICRO_BATCHES = 3
EVALUATION = "evaluation"  # the phase after the steps


@dataclass(frozen=True)
class RankUsage:
    """What one rank uses in a step."""

    rank: int
    peak: Peak
    collectives: list[Collective]  # of one step
    seconds: float | None  # of computing, roughly; None: not known
    host: int = 0  # the most bytes that offloaded activations take in the host's memory
    not_evaluated: str = ""  # why evaluations are not in the peak; empty: they are, or there are none


@dataclass(frozen=True)
class _StepCounts:
    """What one step sends and computes."""

    collectives: list[Collective]
    seconds: float | None

    def extended(self, longer: _StepCounts, times: int) -> _StepCounts:
        """This step and so often what a longer one has more: that of one more micro-batch."""
        more = {each.key: each for each in longer.collectives}
        return _StepCounts(
            [each.extended(more[each.key], times) for each in self.collectives],
            None if self.seconds is None else self.seconds + times * ((longer.seconds or 0.0) - self.seconds),
        )


@dataclass(frozen=True)
class StrategyTrial:
    """A strategy on so many ranks, to be tried: each rank in a process of its own, because torch keeps meshes."""

    run: RunParts
    training: Any  # the training set
    evaluation: Any  # the evaluation set; None: there is none
    strategy: Strategy
    batches: BatchSizes
    device: Device

    def __call__(self, rank: int) -> tuple[RankUsage | NotYetSent, dict[Any, Any]]:
        """What this rank uses, or which rank is to be tried before; and what it has sent to others."""
        machine = self.strategy.machine
        launch = replace(machine.launch, rank=rank, local_rank=rank % self.device.per_machine)
        strategy = replace(self.strategy, machine=replace(machine, launch=launch))
        try:
            with strategy:
                return self._run_steps(strategy, rank), FakeGroup.mail
        except NotYetSent as needed:  # a pipeline's stage, whose neighbour is to be tried before
            if dist.is_initialized():
                dist.destroy_process_group()
            return needed, FakeGroup.mail

    def _run_steps(self, strategy: Strategy, rank: int) -> RankUsage:
        machine = strategy.machine
        tf32 = machine.tf32 and machine.precision == "fp32"
        mode, traffic = FakeRunMode(), Traffic(self.device.per_machine)
        roofline = Roofline(self.device, "tf32" if tf32 else machine.precision)
        traffic.register_groups(strategy.groups())
        on_cpu = self.device.name == DEVICES["cpu"].name
        ledger = Ledger(mode, traffic, roofline)
        copies = CountedCopies(strategy.device)
        strategy.host_copies = lambda _: None if on_cpu else copies  # a host has one memory
        # before the mode: data sets and transforms need values
        batches, evaluated = self._read_batches(), self._read_evaluation_batch()
        with mode, torch_without_values(on_cpu), ledger:
            batches = [_without_values(batch, mode) for batch in batches]
            evaluated = [_without_values(batch, mode) for batch in evaluated]
            # build what fit builds, in the same order, with a network that has shapes and no values
            run = replace(self.run, strategy=strategy, machine=machine)
            run.make_network = partial(make_network, self.run.make_network, mode)
            prepared = prepare_network(run, partial(_example, batches[0]))
            parallel = strategy.build(run.task, prepared.network, _example(batches[0]))
            rules, roles = prepared.rules, prepared.roles
            del prepared  # whose network some strategies have taken apart
            parallel.keep_average(run.settings.ema.decay, run.settings.ema.every)
            if run.settings.loop.on_nonfinite == "skip":
                parallel.skip_broken_steps()
            groups = parameter_groups(parallel.network, run.spare_vectors, rules, roles)
            with ledger.making("optimizer"):
                optimizer = parallel.optimizer(run.make_optimizer, groups)
            # after the strategy has built: only now parameters are the shards that this rank holds
            ledger.label_network(parallel.network)
            ledger.label(parallel.average.state().values(), "optimizer")
            ledger.label_step(optimizer)
            counts: list[_StepCounts] = []
            for number, tried in enumerate(_tried_batches(batches, parallel.interleaves)):
                self._run_step(parallel, optimizer, tried, number, ledger)
                parallel.after_step(number + 1)
                counts.append(_StepCounts(traffic.take(), roofline.take()))
            ledger.phase = EVALUATION  # of a larger batch, so it may be what takes most
            not_evaluated = "; ".join(_evaluate(parallel, batch) for batch in evaluated)
        # the first step is like no other; of many micro-batches the last two steps tell what one more takes
        step = counts[1] if len(counts) == 2 else counts[1].extended(counts[2], len(batches) - 2)
        collectives = sorted(step.collectives, key=lambda each: -each.wire)
        return RankUsage(rank, ledger.peak(), collectives, step.seconds, copies.peak, not_evaluated)

    def _run_step(
        self, parallel: ParallelModel, optimizer: Optimizer, batches: list[Batch], step: int, ledger: Ledger
    ) -> None:
        """One optimizer step, as the loop does it."""
        ledger.phase = "forward and backward"
        parallel.forward_backward(batches, step)
        ledger.phase = "optimizer"
        parallel.optimizer_step(optimizer, self.run.settings.loop.max_norm)

    def _read_batches(self) -> list[Batch]:
        """The micro-batches of one rank's largest step, with values; of the samples only the shapes matter."""
        share, size = self.batches.total // self.batches.ranks, dataset_size(self.training)
        if share > size:  # share: samples of one rank in a step
            raise Refusal(
                f"one rank has {share:,} samples in a step, and the training set only {size:,}; a plan reads"
                f" one rank's: loop.global_batch={size * self.batches.ranks}, or more samples"
            )
        loader = TrainLoader(
            self.run.data, self.training, self._sampler, share, self.batches.micro_batches, LoaderOptions(workers=0)
        )
        batches = next(loader.epoch(self.run.data.largest_epoch))
        return [self._of_all_ranks(batch, self.batches.total) for batch in batches]

    def _read_evaluation_batch(self) -> list[Batch]:
        """The largest micro-batch of one rank's evaluations, with values; nothing where nothing is evaluated."""
        if self.evaluation is None:
            return []
        total = min(evaluation_batch_size(self.run.settings.loop), dataset_size(self.evaluation))
        share, options = -(-total // self.batches.ranks), LoaderOptions(workers=0)
        loader = EvalLoader(self.run.data, self.evaluation, self._sampler, share, self.batches.micro_batches, options)
        batch, _ = next(loader.batches([0]))
        return [self._of_all_ranks(batch, total)]

    @property
    def _sampler(self) -> RankSampler:
        """That of an only rank, so that a data set smaller than the global batch of 1,024 ranks is enough."""
        return RankSampler(0, 1, self.strategy.machine.torch_device, self.run.settings.seed)

    def _of_all_ranks(self, batch: Batch, total: int) -> Batch:
        """A rank's batch with the span of the global one, because a loss is divided by all of its samples."""
        ranks = self.batches.ranks
        return batch._replace(span=range(batch.span.start * ranks, batch.span.stop * ranks), total=total)


def _evaluate(parallel: ParallelModel, batch: Batch) -> str:
    """Evaluate a micro-batch; why it failed: a metric may read values, which there are none of."""
    try:
        with torch.no_grad():
            parallel.evaluate(batch, len(batch.indices))
    except Exception as error:  # of the user's task; training can be planned without it
        return first_line(error)
    return ""


def _tried_batches(batches: list[Batch], interleaves: bool) -> list[list[Batch]]:
    """The micro-batches of each step that is run; the optimizer makes its state in the first one."""
    if interleaves or len(batches) <= MOST_MICRO_BATCHES:
        return [batches, batches]
    return [batches[:2], batches[:2], batches[:3]]


def _without_values(batch: Batch, mode: FakeRunMode) -> Batch:
    """A micro-batch of the same shapes."""
    inputs, targets, indices = map_tensors((batch.inputs, batch.targets, batch.indices), mode.from_tensor)
    return batch._replace(inputs=inputs, targets=targets, indices=indices)


def _example(batch: Batch) -> tuple[Any, Any]:
    """Two samples of it, as (inputs, targets): enough to see what a step touches."""
    rows = len(batch.indices)
    return slice_rows((batch.inputs, batch.targets), 0, min(2, rows), rows)


def try_ranks(trial: StrategyTrial) -> list[RankUsage]:
    """What each rank uses that differs from the first: those that it exchanges values with one by one.

    A rank that needs what another one has not sent yet is tried again after it.
    """
    usages: list[RankUsage] = []
    waiting = [0]  # ranks to be tried, the next one last; rank 0 stands for all that are like it
    while waiting:
        rank = waiting[-1]
        ((_, result),) = run_forked({rank: partial(trial, rank)}, at_once=1)
        if isinstance(result, Exception):
            raise result
        outcome, mail = result
        FakeGroup.mail.update(mail)  # which the next process inherits when it is forked
        if isinstance(outcome, RankUsage):
            usages.append(outcome)
            waiting.pop()
        elif outcome.rank in waiting:  # both wait for each other: who has sent something by now may go on
            waiting.insert(0, waiting.pop())
        else:
            waiting.append(outcome.rank)
    return usages
