"""After a difference was found: the same steps with one suspect taken out at a time, to know whose it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainer.jobs.run_parts import PreparedRun
from trainer.launch.stop_signals import StopRequest
from trainer.learning.task import gathers_samples, is_recurrent
from trainer.messages import Refusal
from trainer.verify.comparison import Comparison, Tolerances, compare
from trainer.verify.fixed_randomness import FixedRandomness
from trainer.verify.plain_loop import Variation, run_plain_loop
from trainer.verify.short_run import initial_progress, train_and_record
from trainer.verify.training_record import Phase, TrainingRecord
from trainer.verify.verdict import (
    DIVIDED,
    FIXED_RANDOMNESS,
    NO_EVALUATIONS,
    NO_RECOMPUTING,
    NO_RESUME,
    ONE_MICRO_BATCH,
    PROCESSES_VISIBLE,
    RECREATED,
    REPEATED,
    REVERSED,
    SYNC_BN,
    TRIAL_FORWARD,
    UNCOMPILED,
    ExperimentResults,
    FirstDifference,
    RunFacts,
)


@dataclass
class Experiments:
    """All that each of them needs."""

    run: PreparedRun
    reference: TrainingRecord
    first: FirstDifference
    ends: Sequence[int]  # where the first part of the training ends, and the whole of it
    exact: Tolerances
    stop: StopRequest

    def run_all(self) -> ExperimentResults:
        """Collective: each rank by itself, in turn, what users have written; then all together the strategy."""
        run, world = self.run, self.run.strategy.world
        if is_recurrent(run.task) or gathers_samples(run.task):
            return ExperimentResults(failed="the task keeps something from one batch to another")
        run.strategy.use_long_timeout()
        alone: dict[str, bool] = {}
        plain, drawn, failed = TrainingRecord(), set[str](), ""
        for rank in range(world.size):  # side by side they would need the memory of as many networks
            if rank == world.rank:
                try:
                    plain, drawn, alone = self._alone()
                except Exception as error:  # whatever a network may raise: what is known is told without it
                    failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            world.barrier()  # all ranks
        every = world.all_gather_values((alone, drawn, failed))  # all ranks; some words each
        alone = {name: any(own.get(name, False) for own, _, _ in every) for own, _, _ in every for name in own}
        generators = sorted({name for _, own, _ in every for name in own})
        failed = next((why for _, _, why in every if why), "")
        if failed or (any(alone.values()) and "BatchNorm" not in self._kind):
            return ExperimentResults(alone, {}, generators, failed)
        # what the main rank did by hand is what all compare with
        (plain, *_) = world.all_gather_values(plain if world.is_main else None)  # all ranks
        return ExperimentResults(alone, self._mended(plain), generators)

    @property
    def _kind(self) -> str:
        return type(dict(self.run.network.named_modules()).get(self.first.name)).__name__

    def _alone(self) -> tuple[TrainingRecord, set[str], dict[str, bool]]:
        """The plain loop, and which changes of it differ in the place that is looked at."""
        run, first = self.run, self.first
        ranks, micro_batches = run.strategy.data_group.size, run.batches.micro_batches
        plain, drawn = self._by_hand(Variation())
        changes = {
            REPEATED: Variation(),
            PROCESSES_VISIBLE: Variation(hides_processes=False),
            TRIAL_FORWARD: Variation(rehearses=True),
        }
        if first.resumed or first.phase == Phase.RESUME:
            changes[RECREATED] = Variation(recreates=True)
        if run.evaluation is not None and first.phase not in (
            Phase.RATE,
            Phase.EVALUATION,
        ):  # a rate may follow figures
            changes[NO_EVALUATIONS] = Variation(evaluates=False)
        alone = {
            name: self._there(self._compared(plain, self._by_hand(how)[0]), plain) for name, how in changes.items()
        }
        if ranks * micro_batches > 1:
            still = run.strategy.sync_bn  # then its statistics are not the network's own matter
            try:
                divided = self._by_hand(Variation(ranks, micro_batches, frozen_norms=still))[0]
            except Refusal:  # a task that gathers rows
                return plain, drawn, alone
            whole = self._by_hand(Variation(frozen_norms=True))[0] if still else plain
            alone[DIVIDED] = self._there(self._compared(whole, divided), whole)
            if alone[DIVIDED]:
                backwards = self._by_hand(Variation(ranks, micro_batches, frozen_norms=still, reverses=True))[0]
                alone[REVERSED] = self._there(self._compared(divided, backwards), divided)
        return plain, drawn, alone

    def _by_hand(self, how: Variation) -> tuple[TrainingRecord, set[str]]:
        start = initial_progress(self.run, self.ends[-1])
        return run_plain_loop(self.run, self.reference.layouts, start, self.ends, self.first.step, how)

    def _mended(self, plain: TrainingRecord) -> dict[str, bool]:
        """Collective: without which part of it does the strategy as the plain loop does?"""
        run, first, mended = self.run, self.first, dict[str, bool]()
        if first.phase == Phase.RESUME or self._position(plain) is None:
            return mended  # nobody has it without the strategy
        strategy, machine = run.strategy, run.machine
        mended[FIXED_RANDOMNESS] = self._right(plain, FIXED_RANDOMNESS, run)
        if mended[FIXED_RANDOMNESS]:
            return mended
        if first.step > self.ends[0]:
            mended[NO_RESUME] = self._right(plain, NO_RESUME, run, ends=self.ends[-1:])
        if first.step and run.evaluation is not None:
            mended[NO_EVALUATIONS] = self._right(plain, NO_EVALUATIONS, run, evaluates=False)
        if run.batches.micro_batches > 1 and self._may_be_one():
            loop = replace(run.settings.loop, micro_batches=1, micro_batch=None)
            batches = replace(run.batches, micro_batches=1)
            one = replace(run, settings=replace(run.settings, loop=loop), batches=batches)
            mended[ONE_MICRO_BATCH] = self._right(plain, ONE_MICRO_BATCH, one)
        if strategy.activation_checkpointing != "none":
            with with_fields(strategy, activation_checkpointing="none"):
                mended[NO_RECOMPUTING] = self._right(plain, NO_RECOMPUTING, run)
        if machine.compile:
            plainly = replace(machine, compile=False)
            with with_fields(strategy, machine=plainly):
                mended[UNCOMPILED] = self._right(plain, UNCOMPILED, replace(run, machine=plainly))
        if "BatchNorm" in self._kind and not strategy.sync_bn and strategy.data_group.size > 1:
            with with_fields(strategy, sync_bn=True):
                mended[SYNC_BN] = self._right(plain, SYNC_BN, run)
        return mended

    def _may_be_one(self) -> bool:
        run = self.run
        world, rank_batch = run.strategy.world.size, run.settings.loop.global_batch // run.strategy.data_group.size
        try:
            run.strategy.refuse_shares(world, rank_batch, 1, run.settings.loop.uneven)
        except Refusal:  # a pipeline needs several
            return False
        return True

    def _right(
        self,
        plain: TrainingRecord,
        name: str,
        run: PreparedRun,
        ends: Sequence[int] | None = None,
        evaluates: bool = True,
    ) -> bool:
        """Collective: is the strategy, changed so, the same as the plain loop up to the place that is looked at?"""
        record, machine = (
            TrainingRecord(layouts=self.reference.layouts),
            replace(run.strategy.machine, dropout="native"),
        )
        with with_fields(run.strategy, machine=machine):
            run = replace(run, machine=machine)
            ends, randomness = ends or self.ends, FixedRandomness()
            train_and_record(
                run, record, ends, self.stop, self.ends[0], draws=randomness, name=name, evaluates=evaluates
            )
        comparison, position = self._compared(plain, record), self._position(plain)
        early = (
            any(difference.at <= position for difference in comparison.differences) if position is not None else False
        )
        return not any(run.strategy.world.all_gather_values(early))  # all ranks; a flag each

    def _compared(self, reference: TrainingRecord, record: TrainingRecord) -> Comparison:
        return compare(replace(reference, floors=self.reference.floors), record, self.exact)

    def _there(self, comparison: Comparison, plain: TrainingRecord) -> bool:
        """Is the first difference the one that is looked for?"""
        position, keys = self._position(plain), [*plain.values]
        first = min((difference.at for difference in comparison.differences), default=None)
        if first is None or (keys[first].step, keys[first].phase) != (self.first.step, self.first.phase):
            return False
        return position is None or first <= position

    def _position(self, plain: TrainingRecord) -> int | None:
        """Where in the order of time the difference is that has been found."""
        wanted = self.first.step, self.first.phase, self.first.name
        return next((at for at, key in enumerate(plain.values) if key[:3] == wanted), None)


@contextmanager
def with_fields(strategy: Any, **fields: Any) -> Iterator[None]:
    """Inside a strategy has these fields."""
    before = {name: getattr(strategy, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(strategy, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(strategy, name, value)


def collect_facts(run: PreparedRun, strays: Collection[str]) -> RunFacts:
    """What else is known of the training that is compared."""
    return RunFacts(
        data_ranks=run.strategy.data_group.size,
        micro_batches=run.batches.micro_batches,
        planned=run.strategy.world.size > run.strategy.data_group.size,
        native=run.strategy.dropout == "native",
        kinds={name: type(module).__name__ for name, module in run.network.named_modules()},
        strays=strays,
        stepping=custom_optimizer(run) if run.sharded else "",
    )


def custom_optimizer(run: PreparedRun) -> str:
    """The class of the optimizer, where it is not one of torch's."""
    kind = type(run.make_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}]))
    return "" if kind.__module__.startswith("torch.") else kind.__name__
