"""The rows of a plan: every strategy computed from the trial of one, and tried itself while there is time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from trainer.jobs.batch_sizes import BatchSizes, divide_batch
from trainer.jobs.plan.devices import Device
from trainer.jobs.plan.estimate import Base, NetworkSizes, estimate_usage, measure_network
from trainer.jobs.plan.fake_mode import FakeRunMode, make_network
from trainer.jobs.plan.forks import run_forked
from trainer.jobs.plan.report import Row, make_row
from trainer.jobs.plan.slices import Tried, find_largest_slice, possible_slices
from trainer.jobs.plan.trial import EVALUATION, StrategyTrial, try_ranks
from trainer.jobs.preparation import seeded_network
from trainer.jobs.run_parts import RunParts
from trainer.messages import Refusal, first_line
from trainer.strategies.candidates import Candidate

LATE = "not tried in time (job.seconds)"
MAX_TRIALS_AT_ONCE = 4  # strategies: each needs some hundred MB beside what they share
MAX_REMEDIES = 3  # strategies that do not fit, for which something is looked for that makes them fit


class Plannable(NamedTuple):
    """A candidate that can be tried."""

    candidate: Candidate
    words: str  # of the command line, without those of a slice
    trial: StrategyTrial
    slices: Sequence[BatchSizes]  # of which the largest that fits is looked for; empty: the trial has the batches

    def row(self, tried: Tried, device: Device, how: str) -> Row:
        """What it takes, by its trial or by an estimate."""
        batches, usages = tried
        words = self.words + (f" loop.micro_batch={batches.largest}" if self.slices else "")
        processes = self.trial.strategy.machine.launch.world_size
        division = self.candidate.division
        divides = division is None or max(division) > 1
        return make_row(self.candidate.name, words.strip(), processes, usages, batches, device, divides, how)


@dataclass
class PlanSearch:
    """Plans for one number of processes."""

    parts: RunParts
    data_sets: tuple[Any, Any]  # the training and the evaluation set
    device: Device
    spare: float  # part of the memory that a slice leaves
    deadline: float  # of the monotonic clock: nothing is tried after it
    refused: dict[str, str] = field(default_factory=dict)  # words of a strategy that cannot be used → why

    def run(self, candidates: Sequence[Candidate], count: int) -> list[Row]:
        """A row for each of these candidates that can be used, on so many processes."""
        mode = FakeRunMode()
        with mode:  # its shapes are enough for what a strategy refuses by itself, and for estimates
            network = make_network(partial(seeded_network, self.parts), mode)
        every = {each.words: each for each in self._plannable(candidates, count, network)}
        rows: dict[str, Row] = {}
        # the simplest ones first: what they take tells about what the others do
        first = dict(list(every.items())[:2])
        waiting = {words: each for words, each in every.items() if words not in first}
        for words, tried in self._try(first):
            rows[words] = first[words].row(tried, self.device, "simulated")
            if not rows[words].divides and len(tried[1]) == 1:
                base = Base(tried[1][0], tried[0])
                sizes = measure_network(network, self.parts.task.plan(network))
                rows |= {words: self._estimate(each, base, sizes) for words, each in waiting.items()}
        # then those that promise most
        waiting = dict(sorted(waiting.items(), key=lambda item: _promise(rows.get(item[0]))))
        for words, tried in self._try(waiting):
            rows[words] = waiting[words].row(tried, self.device, "simulated")
        rows = {words: row for words, row in rows.items() if words not in self.refused}
        late = [words for words in every if words not in {*rows, *self.refused}]
        self.refused |= dict.fromkeys(late, LATE)
        self._find_remedies(every, rows)
        return [rows[words] for words in every if words in rows]

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self._at_once = min(cores, MAX_TRIALS_AT_ONCE)

    def _plannable(self, candidates: Sequence[Candidate], count: int, network: Any) -> Iterator[Plannable]:
        """Those that do not refuse by themselves, with batches that divide."""
        for candidate in candidates:
            try:
                words, batches, slices = divide_candidate(self.parts, candidate, count)
                candidate.strategy.check(self.parts.task, network, count)
            except Refusal as refusal:
                self.refused[candidate.arguments] = first_line(refusal)
                continue
            trial = StrategyTrial(self.parts, *self.data_sets, candidate.strategy, batches, self.device)
            yield Plannable(candidate, words, trial, slices)

    def _try(self, plannable: Mapping[str, Plannable]) -> Iterator[tuple[str, Tried]]:
        """Each in a process of its own, several at a time, its ranks in processes of that one; as they are done."""
        limit = self.device.free * (1 - self.spare)
        functions = {words: partial(_try_candidate, each, limit) for words, each in plannable.items()}
        for words, result in run_forked(functions, self._at_once, self.deadline):
            if isinstance(result, Exception):  # a network that this strategy cannot train, or a process that was killed
                self.refused[words] = first_line(result).removeprefix("FatalRunError: ")
            else:
                yield words, result

    def _estimate(self, each: Plannable, base: Base, sizes: NetworkSizes) -> Row:
        """The row of a strategy that has not been tried."""
        division, count = each.candidate.division, each.trial.strategy.machine.launch.world_size
        assert division is not None  # only what the user has named has none, and that is tried first

        def usage(batches: BatchSizes) -> Tried:
            return batches, [estimate_usage(division, batches, count, self.device.per_machine, base, sizes)]

        limit = self.device.free * (1 - self.spare)
        estimates = map(usage, each.slices or [each.trial.batches])
        tried = next((tried for tried in estimates if tried[1][0].peak.bytes <= limit), None)
        return each.row(tried or usage((each.slices or [each.trial.batches])[-1]), self.device, "computed")

    def _find_remedies(self, every: Mapping[str, Plannable], rows: dict[str, Row]) -> None:
        """Say what makes strategies fit that do not: what was tried, for the quickest of them."""
        misfits = sorted((row.step_s, words) for words, row in rows.items() if not row.fits)
        if not misfits:
            return
        fitting = min((row for row in rows.values() if row.fits), key=lambda row: row.step_s, default=None)
        if fitting is not None:
            rows.update({words: replace(rows[words], advice=f"{fitting.arguments} fits") for _, words in misfits})
        functions = {
            words: partial(find_remedy, every[words], self.device.free, rows[words].at_peak.moment)
            for _, words in misfits[:MAX_REMEDIES]
        }
        for words, remedy in run_forked(functions, self._at_once, self.deadline):
            if isinstance(remedy, str):
                rows[words] = replace(rows[words], advice=remedy)


def divide_candidate(parts: RunParts, candidate: Candidate, count: int) -> tuple[str, BatchSizes, list[BatchSizes]]:
    """The words of this candidate with batches that divide, these batches, and slices to choose from.

    Refusal where no batches divide.
    """
    loop, strategy = parts.settings.loop, candidate.strategy
    ranks, total = strategy.data_ranks(count), loop.global_batch
    micro_batches = max(loop.micro_batches, candidate.micro_batches)
    micro_batch = None if loop.micro_batch == "auto" else loop.micro_batch
    unit = ranks * (micro_batch or micro_batches)  # samples; the global batch must be a multiple
    if total % unit and not loop.uneven:
        total = -(-total // unit) * unit  # the nearest above: what does not divide would be refused
    batches = divide_batch(total, ranks, micro_batches, micro_batch, loop.uneven)
    strategy.refuse_shares(count, total // ranks, batches.micro_batches, loop.uneven)
    words = [candidate.arguments] if candidate.arguments else []
    slices = []
    if loop.micro_batch == "auto":
        slices = possible_slices(batches, strategy, candidate.micro_batches)
    elif micro_batches != loop.micro_batches:
        words.append(f"loop.micro_batches={micro_batches}")
    words += [f"loop.global_batch={total}"] if total != loop.global_batch else []
    return " ".join(words), batches, slices


def _try_candidate(each: Plannable, limit: float) -> Tried:
    """In a process of its own: what its ranks use."""
    if each.slices:
        return find_largest_slice(each.trial, each.slices, limit)
    return each.trial.batches, try_ranks(each.trial)


def find_remedy(each: Plannable, limit: float, moment: str) -> str | None:
    """In a process of its own: which smaller slices, or recomputing, make a strategy fit; None: neither.

    moment: when it holds most. Evaluations take less in smaller batches, and nothing that is computed changes.
    """
    whole, strategy = each.trial.batches, each.trial.strategy
    if moment.startswith(EVALUATION):
        settings = each.trial.run.settings
        loop = replace(settings.loop, eval_batch=whole.total)
        trial = replace(each.trial, run=replace(each.trial.run, settings=replace(settings, loop=loop)))
        peak = max(usage.peak.bytes for usage in try_ranks(trial))
        if peak <= limit:
            return f"with loop.eval_batch={whole.total} it fits ({peak / 2**20:,.0f} MiB)"
    slices = [batches for batches in possible_slices(whole, strategy, 1) if batches.largest < whole.largest]
    recomputing = replace(each.trial, strategy=replace(strategy, activation_checkpointing="units"))
    for words, trial, batches in (
        ("", each.trial, slices),  # changes nothing that is computed, so it comes first
        ("strategy.activation_checkpointing=units ", recomputing, [whole, *slices]),
    ):
        if not batches or (trial is recomputing and strategy.activation_checkpointing != "none"):
            continue
        batches_that_fit, usages = find_largest_slice(trial, batches, limit)
        peak = max(usage.peak.bytes for usage in usages)
        if peak <= limit:
            smaller = f"loop.micro_batch={batches_that_fit.largest} " if batches_that_fit != whole else ""
            return f"with {words}{smaller}it fits ({peak / 2**20:,.0f} MiB)"
    return None


def _promise(row: Row | None) -> tuple[bool, float]:
    """What is tried first: what seems to fit, and to be quick."""
    return (True, 0.0) if row is None else (not row.fits, row.step_s)
