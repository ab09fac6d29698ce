"""Experiments after a difference: the same steps with one suspect taken out at a time, to know whose it is."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from trainer.data.data import ReadTwice
from trainer.data.nested_tensors import tensors
from trainer.data.sampler import dataset_size, make_epoch_order
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.stop_signals import StopRequest
from trainer.learning.task import gathers_samples
from trainer.messages import Refusal
from trainer.verify.batch_parts import read_batch_parts
from trainer.verify.comparison import Comparison, Tolerances, compare
from trainer.verify.fixed_randomness import FixedRandomness
from trainer.verify.plain_loop import Variation, run_plain_loop
from trainer.verify.short_run import initial_progress, temporary_attributes, train_and_record
from trainer.verify.training_record import Phase, TrainingRecord
from trainer.verify.verdict import (
    DIVIDED,
    FIXED_RANDOMNESS,
    NO_EVALUATIONS,
    NO_RECOMPUTING,
    NO_RESUME,
    ONE_MICRO_BATCH,
    PADDED_TOGETHER,
    PROCESSES_VISIBLE,
    RECREATED,
    REPEATED,
    RESEEDED,
    REVERSED,
    SYNC_BN,
    TRIAL_FORWARD,
    UNCOMPILED,
    ExperimentResults,
    FirstDifference,
    RunFacts,
)

_READ_TWICE = 8  # items: a flip that chance decides may come out alike
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


@dataclass
class Experiments:
    """The same steps again, each time with one suspect changed or taken out."""

    run: PreparedRun
    reference: TrainingRecord
    first: FirstDifference
    ends: Sequence[int]  # where the first part of the training ends, and the whole of it
    tolerances: Tolerances
    stop: StopRequest

    def run_all(self) -> ExperimentResults:
        """Collective: each rank by itself, in turn, what users have written; then all together the strategy."""
        run, world = self.run, self.run.strategy.world
        if gathers_samples(run.task):
            return ExperimentResults(failed="the task keeps something of each sample of an evaluation")
        run.strategy.use_long_timeout()  # the other ranks wait for as long as a plain loop takes
        # first the plain loop, with changes: does it differ in the same place, without any strategy?
        alone: dict[str, bool] = {}
        plain, generators, failed = TrainingRecord(), set[str](), ""
        for rank in range(world.size):  # side by side they would need the memory of as many networks
            if rank == world.rank:
                try:
                    plain, generators, alone = self._vary_plain_loop()
                except Exception as error:  # whatever a network may raise: what is known is told without it
                    failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            world.barrier()  # all ranks
        results = world.all_gather_values((alone, generators, failed))  # all ranks; some words each
        names = dict.fromkeys(name for on_rank, _, _ in results for name in on_rank)
        alone = {name: any(on_rank.get(name, False) for on_rank, _, _ in results) for name in names}
        used = sorted({name for _, on_rank, _ in results for name in on_rank})
        failed = next((why for _, _, why in results if why), "")
        if failed or (any(alone.values()) and "BatchNorm" not in self._module_class):
            return ExperimentResults(alone, {}, used, failed)
        # then the strategy, with parts taken out: is it as the plain loop then? All compare with the main rank's
        (plain, *_) = world.all_gather_values(plain if world.is_main else None)  # all ranks; a whole record
        return ExperimentResults(alone, self._vary_strategy(plain), used)

    @property
    def _module_class(self) -> str:
        """The class of the module where the first difference is; that of None if it is in no module."""
        return type(dict(self.run.network.named_modules()).get(self.first.name)).__name__

    def _vary_plain_loop(self) -> tuple[TrainingRecord, set[str], dict[str, bool]]:
        """The plain loop, the generators that it used, and which changes of it differ in the place of interest."""
        run, first = self.run, self.first
        ranks, micro_batches = run.strategy.data_group.size, run.batches.micro_batches
        plain, generators = self._plain_loop(Variation())
        changes = {
            REPEATED: Variation(),
            PROCESSES_VISIBLE: Variation(hides_processes=False),
            TRIAL_FORWARD: Variation(rehearses=True),
        }
        if generators - {"torch's"}:
            changes[RESEEDED] = Variation(reseeds=True)
        if first.resumed or first.phase == Phase.RESUME:
            changes[RECREATED] = Variation(recreates=True)
        follows_metrics = first.phase in (Phase.RATE, Phase.EVALUATION)  # a rate may
        if run.evaluation is not None and not follows_metrics:
            changes[NO_EVALUATIONS] = Variation(evaluates=False)
        alone = {
            # what is drawn before it, one number for all samples perhaps, is no cause of it
            name: self._differs(plain, self._plain_loop(change)[0], there=name == RESEEDED)
            for name, change in changes.items()
        }
        if ranks * micro_batches > 1:
            # with sync_bn the statistics of BatchNorm are the strategy's: compared with a loop that has fixed ones
            frozen = run.strategy.sync_bn
            try:
                divided = self._plain_loop(Variation(ranks, micro_batches, frozen_norms=frozen))[0]
            except Refusal:  # a task that gathers rows
                return plain, generators, alone
            whole = self._plain_loop(Variation(frozen_norms=True))[0] if frozen else plain
            alone[DIVIDED] = self._differs(whole, divided)
            if alone[DIVIDED]:
                reverse = Variation(ranks, micro_batches, frozen_norms=frozen, reverses=True)
                together = Variation(ranks, micro_batches, frozen_norms=frozen, pads_together=True)
                alone[PADDED_TOGETHER] = self._differs(whole, self._plain_loop(together)[0])
                alone[REVERSED] = self._differs(divided, self._plain_loop(reverse)[0])
        return plain, generators, alone

    def _plain_loop(self, variation: Variation) -> tuple[TrainingRecord, set[str]]:
        """A plain loop up to the step of the first difference."""
        start = initial_progress(self.run, self.ends[-1])
        return run_plain_loop(self.run, self.reference.layouts, start, self.ends, self.first.step, variation)

    def _vary_strategy(self, plain: TrainingRecord) -> dict[str, bool]:
        """Collective: without which part does the strategy train as the plain loop does?"""
        run, first, mended = self.run, self.first, dict[str, bool]()
        if first.phase == Phase.RESUME or self._position(plain) is None:
            return mended  # the plain loop has no such thing
        strategy, machine = run.strategy, run.machine
        # each with fixed random numbers; if these alone mend it, nothing else need be tried
        mended[FIXED_RANDOMNESS] = self._is_mended(plain, FIXED_RANDOMNESS, run)
        if mended[FIXED_RANDOMNESS]:
            return mended
        if first.step > self.ends[0]:
            mended[NO_RESUME] = self._is_mended(plain, NO_RESUME, run, ends=self.ends[-1:])
        if first.step and run.evaluation is not None:
            mended[NO_EVALUATIONS] = self._is_mended(plain, NO_EVALUATIONS, run, evaluates=False)
        if run.batches.micro_batches > 1 and self._allows_one_micro_batch():
            loop = replace(run.settings.loop, micro_batches=1, micro_batch=None)
            batches = replace(run.batches, micro_batches=1)
            undivided = replace(run, settings=replace(run.settings, loop=loop), batches=batches)
            mended[ONE_MICRO_BATCH] = self._is_mended(plain, ONE_MICRO_BATCH, undivided)
        if strategy.activation_checkpointing != "none":
            with temporary_attributes(strategy, activation_checkpointing="none"):
                mended[NO_RECOMPUTING] = self._is_mended(plain, NO_RECOMPUTING, run)
        if machine.compile:
            eager = replace(machine, compile=None)
            with temporary_attributes(strategy, machine=eager):
                mended[UNCOMPILED] = self._is_mended(plain, UNCOMPILED, replace(run, machine=eager))
        if "BatchNorm" in self._module_class and not strategy.sync_bn and strategy.data_group.size > 1:
            with temporary_attributes(strategy, sync_bn=True):
                mended[SYNC_BN] = self._is_mended(plain, SYNC_BN, run)
        return mended

    def _allows_one_micro_batch(self) -> bool:
        strategy, loop = self.run.strategy, self.run.settings.loop
        try:
            strategy.refuse_shares(strategy.world.size, loop.global_batch // strategy.data_group.size, 1, loop.uneven)
        except Refusal:  # a pipeline needs several
            return False
        return True

    def _is_mended(
        self,
        plain: TrainingRecord,
        name: str,
        run: PreparedRun,
        ends: Sequence[int] | None = None,
        evaluates: bool = True,
    ) -> bool:
        """Collective: is the strategy, changed so, the same as the plain loop up to the place of interest?"""
        record = TrainingRecord(layouts=self.reference.layouts)
        ends, fixed = ends or self.ends, FixedRandomness()
        train_and_record(run, record, ends, self.stop, self.ends[0], randomness=fixed, name=name, evaluates=evaluates)
        position, differences = self._position(plain), self._compare(plain, record).differences
        differs = position is not None and any(difference.at <= position for difference in differences)
        return not any(run.strategy.world.all_gather_values(differs))  # all ranks; a flag each

    def _compare(self, reference: TrainingRecord, record: TrainingRecord) -> Comparison:
        """With the noise floors of the reference: a plain loop has none of its own."""
        return compare(replace(reference, floors=self.reference.floors), record, self.tolerances)

    def _differs(self, plain: TrainingRecord, other: TrainingRecord, there: bool = False) -> bool:
        """Is the first difference of these two the one that is to be explained? there: and not just before it."""
        position, keys = self._position(plain), [*plain.values]
        first = min((difference.at for difference in self._compare(plain, other).differences), default=None)
        if first is None or (keys[first].step, keys[first].phase) != (self.first.step, self.first.phase):
            return False
        return position is None or (first == position if there else first <= position)

    def _position(self, plain: TrainingRecord) -> int | None:
        """Where the first difference stands in the record's order of time; None: the record has no such thing."""
        wanted = self.first.step, self.first.phase, self.first.name
        return next((at for at, key in enumerate(plain.values) if key[:3] == wanted), None)


def collect_facts(run: PreparedRun, strays: Collection[str]) -> RunFacts:
    """What else is known of the training that is compared."""
    order = make_epoch_order(run.data, dataset_size(run.training), run.settings.seed, 0)
    first = order[: run.settings.loop.global_batch].long()
    parts = read_batch_parts(run, run.strategy.data_group.size, run.batches.micro_batches, 0, first, training=True)
    shapes = set[Any]()
    with suppress(Exception):  # what breaks the reading stands in the comparison
        for part in parts:
            shapes.add(tuple(x.shape[1:] for x in tensors((part.batch.inputs, part.batch.targets))))
    twice = ReadTwice(run.training, run.settings.seed)
    fields = [(f"{name}.{field}", value) for name, m in run.network.named_modules() for field, value in vars(m).items()]
    fields += [(f"Task.{field}", value) for field, value in vars(run.task).items()]
    return RunFacts(
        padded=len(shapes) > 1,
        redrawn=any(twice[index] for index in first[:_READ_TWICE].tolist()),
        generators=[name.lstrip(".") for name, value in fields if isinstance(value, GENERATORS)],
        data_ranks=run.strategy.data_group.size,
        micro_batches=run.batches.micro_batches,
        planned=run.strategy.world.size > run.strategy.data_group.size,
        native=run.strategy.dropout == "native",
        kinds={name: type(module).__name__ for name, module in run.network.named_modules()},
        strays=strays,
        stepping=custom_optimizer(run) if run.sharded else "",
    )


def custom_optimizer(run: PreparedRun) -> str:
    """The class of the optimizer, where it is neither torch's nor ours, and gets shards."""
    kind = type(run.make_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}]))
    return "" if kind.__module__.startswith(("torch.", "trainer.")) else kind.__name__
