"""After a difference was found: the same steps with one suspect taken out at a time, to know whose it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trainer.jobs.run_parts import PreparedRun
from trainer.launch.stop_signals import StopRequest
from trainer.learning.task import gathers_samples, is_recurrent
from trainer.messages import Refusal
from trainer.verify.causes import (
    AGAIN,
    ANEW,
    CONSTANT,
    DIVIDED,
    KEPT,
    LEFT,
    ONE_BATCH,
    REHEARSED,
    SHOWN,
    STRAIGHT,
    SYNC_BN,
    TURNED,
    UNCOMPILED,
    First,
    Tried,
)
from trainer.verify.comparison import Compared, Exactness, compared
from trainer.verify.fixed_randomness import FixedDraws
from trainer.verify.plain_loop import How, by_hand
from trainer.verify.short_run import beginning, trial
from trainer.verify.training_record import EVALUATION, RATE, RESUME, Record


@dataclass
class Experiments:
    """All that each of them needs."""

    run: PreparedRun
    reference: Record
    first: First
    ends: Sequence[int]  # where the first part of the training ends, and the whole of it
    exact: Exactness
    stop: StopRequest

    def tried(self) -> Tried:
        """Collective: each rank by itself, in turn, what users have written; then all together the strategy."""
        run, world = self.run, self.run.strategy.world
        if is_recurrent(run.task) or gathers_samples(run.task):
            return Tried(failed="the task keeps something from one batch to another")
        run.strategy.use_long_timeout()
        alone: dict[str, bool] = {}
        plain, drawn, failed = Record(), set[str](), ""
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
            return Tried(alone, {}, generators, failed)
        # what the main rank did by hand is what all compare with
        (plain, *_) = world.all_gather_values(plain if world.is_main else None)  # all ranks
        return Tried(alone, self._mended(plain), generators)

    @property
    def _kind(self) -> str:
        return type(dict(self.run.network.named_modules()).get(self.first.name)).__name__

    def _alone(self) -> tuple[Record, set[str], dict[str, bool]]:
        """The plain loop, and which changes of it differ in the place that is looked at."""
        run, first = self.run, self.first
        ranks, micro_batches = run.strategy.data_group.size, run.batches.micro_batches
        plain, drawn = self._by_hand(How())
        changes = {AGAIN: How(), SHOWN: How(hidden=False), REHEARSED: How(rehearses=True)}
        if first.resumed or first.phase == RESUME:
            changes[ANEW] = How(anew=True)
        if run.evaluation is not None and first.phase not in (RATE, EVALUATION):  # a rate may follow figures
            changes[LEFT] = How(evaluates=False)
        alone = {
            name: self._there(self._compared(plain, self._by_hand(how)[0]), plain) for name, how in changes.items()
        }
        if ranks * micro_batches > 1:
            still = run.strategy.sync_bn  # then its statistics are not the network's own matter
            try:
                divided = self._by_hand(How(ranks, micro_batches, still_norms=still))[0]
            except Refusal:  # a task that gathers rows
                return plain, drawn, alone
            whole = self._by_hand(How(still_norms=True))[0] if still else plain
            alone[DIVIDED] = self._there(self._compared(whole, divided), whole)
            if alone[DIVIDED]:
                backwards = self._by_hand(How(ranks, micro_batches, still_norms=still, backwards=True))[0]
                alone[TURNED] = self._there(self._compared(divided, backwards), divided)
        return plain, drawn, alone

    def _by_hand(self, how: How) -> tuple[Record, set[str]]:
        start = beginning(self.run, self.ends[-1])
        return by_hand(self.run, self.reference.layouts, start, self.ends, self.first.step, how)

    def _mended(self, plain: Record) -> dict[str, bool]:
        """Collective: without which part of it does the strategy as the plain loop does?"""
        run, first, mended = self.run, self.first, dict[str, bool]()
        if first.phase == RESUME or self._position(plain) is None:
            return mended  # nobody has it without the strategy
        strategy, machine = run.strategy, run.machine
        mended[CONSTANT] = self._right(plain, CONSTANT, run)
        if mended[CONSTANT]:
            return mended
        if first.step > self.ends[0]:
            mended[STRAIGHT] = self._right(plain, STRAIGHT, run, ends=self.ends[-1:])
        if first.step and run.evaluation is not None:
            mended[LEFT] = self._right(plain, LEFT, run, evaluates=False)
        if run.batches.micro_batches > 1 and self._may_be_one():
            loop = replace(run.settings.loop, micro_batches=1, micro_batch=None)
            batches = replace(run.batches, micro_batches=1)
            one = replace(run, settings=replace(run.settings, loop=loop), batches=batches)
            mended[ONE_BATCH] = self._right(plain, ONE_BATCH, one)
        if strategy.activation_checkpointing != "none":
            with changed(strategy, activation_checkpointing="none"):
                mended[KEPT] = self._right(plain, KEPT, run)
        if machine.compile:
            plainly = replace(machine, compile=False)
            with changed(strategy, machine=plainly):
                mended[UNCOMPILED] = self._right(plain, UNCOMPILED, replace(run, machine=plainly))
        if "BatchNorm" in self._kind and not strategy.sync_bn and strategy.data_group.size > 1:
            with changed(strategy, sync_bn=True):
                mended[SYNC_BN] = self._right(plain, SYNC_BN, run)
        return mended

    def _may_be_one(self) -> bool:
        run = self.run
        world, share = run.strategy.world.size, run.settings.loop.global_batch // run.strategy.data_group.size
        try:
            run.strategy.refuse_shares(world, share, 1, run.settings.loop.uneven)
        except Refusal:  # a pipeline needs several
            return False
        return True

    def _right(
        self, plain: Record, name: str, run: PreparedRun, ends: Sequence[int] | None = None, evaluates: bool = True
    ) -> bool:
        """Collective: is the strategy, changed so, the same as the plain loop up to the place that is looked at?"""
        record, machine = Record(layouts=self.reference.layouts), replace(run.strategy.machine, dropout="native")
        with changed(run.strategy, machine=machine):
            run = replace(run, machine=machine)
            ends, draws = ends or self.ends, FixedDraws()
            trial(run, record, ends, self.stop, self.ends[0], draws=draws, name=name, evaluates=evaluates)
        own, place = self._compared(plain, record), self._position(plain)
        early = any(difference.at <= place for difference in own.differences) if place is not None else False
        return not any(run.strategy.world.all_gather_values(early))  # all ranks; a flag each

    def _compared(self, one: Record, other: Record) -> Compared:
        return compared(replace(one, floors=self.reference.floors), other, self.exact)

    def _there(self, own: Compared, plain: Record) -> bool:
        """Is the first difference the one that is looked for?"""
        place, keys = self._position(plain), [*plain.values]
        at = min((difference.at for difference in own.differences), default=None)
        if at is None or (keys[at].step, keys[at].phase) != (self.first.step, self.first.phase):
            return False
        return place is None or at <= place

    def _position(self, plain: Record) -> int | None:
        """Where in the order of time the difference is that has been found."""
        wanted = self.first.step, self.first.phase, self.first.name
        return next((at for at, key in enumerate(plain.values) if key[:3] == wanted), None)


@contextmanager
def changed(strategy: Any, **fields: Any) -> Iterator[None]:
    """Inside a strategy has these fields."""
    before = {name: getattr(strategy, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(strategy, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(strategy, name, value)
