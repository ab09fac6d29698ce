"""The rows of a plan: every strategy, tried while there is time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from trainer.jobs.batch_sizes import BatchSizes, divide_batch
from trainer.jobs.plan.choice import LATE
from trainer.jobs.plan.devices import Device
from trainer.jobs.plan.fake_mode import FakeRunMode, make_network
from trainer.jobs.plan.forks import run_forked
from trainer.jobs.plan.report import Row, make_row
from trainer.jobs.plan.slices import Tried, find_largest_slice, possible_slices
from trainer.jobs.plan.trial import StrategyTrial, try_ranks
from trainer.jobs.preparation import seeded_network
from trainer.jobs.run_parts import RunParts
from trainer.messages import Refusal, first_line
from trainer.strategies.candidates import Candidate

MAX_TRIALS_AT_ONCE = 4  # strategies: each needs some hundred MB beside what they share


class Plannable(NamedTuple):
    """A candidate that can be tried."""

    candidate: Candidate
    words: str  # of the command line, without those of a slice
    trial: StrategyTrial
    slices: Sequence[BatchSizes]  # of which the largest that fits is looked for; empty: the trial has the batches

    def row(self, tried: Tried, device: Device) -> Row:
        """What it takes, by its trial."""
        batches, usages = tried
        words = self.words + (f" loop.micro_batch={batches.largest}" if self.slices else "")
        processes = self.trial.strategy.machine.launch.world_size
        return make_row(self.candidate.name, words.strip(), processes, usages, batches, device)


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
        """A row for each of these candidates that can be used, on so many processes, in their order."""
        mode = FakeRunMode()
        with mode:  # its shapes are enough for what a strategy refuses by itself
            network = make_network(partial(seeded_network, self.parts), mode)
        every = {each.words: each for each in self._plannable(candidates, count, network)}
        rows = {words: every[words].row(tried, self.device) for words, tried in self._try(every)}
        self.refused |= {words: LATE for words in every if words not in {*rows, *self.refused}}
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
