"""The job `plan`: what each strategy would take on so many devices, for the user's own network, data and optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from trainer.jobs.batch_sizes import BatchSizes, divide_batch
from trainer.jobs.plan.devices import Device, find_device
from trainer.jobs.plan.forks import run_forked
from trainer.jobs.plan.report import Row, advise, format_plan_table, make_row, row_facts
from trainer.jobs.plan.trial import RankUsage, StrategyTrial, try_ranks
from trainer.jobs.preparation import read_data_sets
from trainer.jobs.run_parts import Job, RunParts
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file, resolve_links
from trainer.messages import Refusal, expand_home, first_line
from trainer.records.run_folder import choose_path
from trainer.strategies.candidates import Candidate, candidates

MAX_TRIALS_AT_ONCE = 4  # trials: each needs some hundred MB beside what they share
SPARE_MEMORY = 0.2  # of a device's memory, which the chosen strategy leaves for what is not counted


class PlanJob(Job):
    """Try every strategy on tensors without values, and say what it takes: memory, bytes on the wire, time."""

    def __init__(
        self,
        processes: Sequence[int] = (1, 2, 4, 8),
        device: str = "cpu",
        strategies: Sequence[str] | None = None,
        seconds: float = 60,
        memory: float | None = None,
        bandwidth: float | None = None,
        inside: float | None = None,
        between: float | None = None,
        per_machine: int | None = None,
    ) -> None:
        if not processes or min(processes) < 1:
            raise Refusal("job.processes: numbers of processes, 1 or more: job.processes=[1,8]")
        self.counts, self.names, self.seconds = sorted({*processes}), strategies, seconds
        keys = {"memory": memory, "bandwidth": bandwidth, "inside": inside, "between": between}
        self.device = find_device(device, {**keys, "per_machine": per_machine})

    def __call__(self, parts: RunParts) -> int:
        """Plan for each number of processes; the exit code. Refusal where nothing can be planned."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job=plan: one process plans for all; leave out processes and torchrun")
        if not hasattr(os, "fork"):
            raise Refusal("job=plan tries each strategy in a copy of its process, which this system cannot make (fork)")
        out = plan_folder(parts)
        torch.set_num_threads(1)  # a process that has started threads cannot be copied safely
        training, _ = read_data_sets(parts)
        rows: list[Row] = []
        for count in self.counts:
            planned, refused = self._plan(parts, training, count)
            rows += planned
            print("\n".join(format_plan_table(planned, refused, self.device)), flush=True)
        chosen = choose_row([row for row in rows if row.processes == self.counts[-1]], self.device)
        for line in advise(rows, chosen, self.device):
            print(line)
        facts = {"device": self.device.name, "free": self.device.free, "spare": SPARE_MEMORY, "doctor": None}
        facts |= {"rows": [row_facts(row) for row in rows]}
        replace_file(
            out / "plan.json", json.dumps({**facts, "chosen": chosen.arguments if chosen else None}, indent=1) + "\n"
        )
        print(f"written     {out / 'plan.json'}")
        return 0

    def _plan(self, parts: RunParts, training: object, count: int) -> tuple[list[Row], list[str]]:
        """The rows of so many processes, and a line for each strategy that cannot be used."""
        began = monotonic()
        trials: dict[str, StrategyTrial] = {}
        named: dict[str, str] = {}
        refused: list[str] = []
        # what a strategy refuses by itself, before any process: degrees and batches that do not divide
        for candidate in self._candidates(parts, count):
            try:
                arguments, batches = candidate_arguments(parts, candidate, count)
            except Refusal as refusal:
                refused.append(f"{candidate.arguments}: {refusal}")
                continue
            trials[arguments] = StrategyTrial(parts, training, candidate.strategy, batches, self.device)
            named[arguments] = candidate.name
        at_once = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, MAX_TRIALS_AT_ONCE)
        results: dict[str, list[RankUsage]] = {}
        untried = dict.fromkeys(trials)
        is_late = partial(lambda: monotonic() - began > self.seconds)
        # each strategy in a process of its own, several at a time; its ranks in processes of that one
        for arguments, result in run_forked(
            {arguments: partial(try_ranks, trial) for arguments, trial in trials.items()}, at_once, is_late
        ):
            del untried[arguments]
            if isinstance(result, Exception):  # a network that this strategy cannot train, or a process that was killed
                refused.append(f"{arguments}: {first_line(result)}")
            else:
                results[arguments] = result
        if untried:
            refused.append(f"not tried in {self.seconds:g} s (job.seconds): {'; '.join(untried)}")
        return [
            make_row(named[arguments], arguments, count, results[arguments], trial.batches, self.device)
            for arguments, trial in trials.items()
            if arguments in results
        ], refused

    def _candidates(self, parts: RunParts, count: int) -> Iterator[Candidate]:
        """The strategies that are asked for, on a machine where nobody else is."""
        per_machine = self.device.per_machine
        launch = Launch(world_size=count, local_world_size=min(count, per_machine))
        precision = parts.machine.precision
        if precision == "auto":
            precision = "bf16" if self.device.bf16 else "fp32"
        machine = replace(
            parts.machine,
            launch=launch,
            device="cpu",  # whose operators are there wherever somebody plans
            precision=precision,
            backend="fake",  # torch's, which sends nothing
            interface=None,
            compile=False,  # operators are noted one by one, as they run without compilation
            compare_copies=False,  # there are no values to compare
        )
        for candidate in candidates(parts.strategy, machine, per_machine):
            if self.names is None or candidate.name in self.names:
                yield candidate


def candidate_arguments(parts: RunParts, candidate: Candidate, count: int) -> tuple[str, BatchSizes]:
    """The arguments of this candidate with batches that divide, and these batches. Refusal where none do."""
    loop, ranks = parts.settings.loop, candidate.strategy.data_ranks(count)
    micro_batches, total = max(loop.micro_batches, candidate.micro_batches), loop.global_batch
    micro_batch = None if loop.micro_batch == "auto" else loop.micro_batch
    unit = ranks * (micro_batch or micro_batches)  # samples; the global batch must be a multiple
    if total % unit and not loop.uneven:
        total = -(-total // unit) * unit  # the nearest above: what does not divide would be refused
    batches = divide_batch(total, ranks, micro_batches, micro_batch, loop.uneven)
    candidate.strategy.refuse_shares(count, total // ranks, batches.micro_batches, loop.uneven)
    arguments = [candidate.arguments]
    arguments += [f"loop.micro_batches={micro_batches}"] if micro_batches != loop.micro_batches else []
    arguments += [f"loop.global_batch={total}"] if total != loop.global_batch else []
    return " ".join(arguments), batches


def choose_row(rows: Sequence[Row], device: Device) -> Row | None:
    """The fastest that leaves some memory; else the fastest that fits; None: none does."""
    fitting = [row for row in rows if row.fits]
    spacious = [row for row in fitting if row.peak <= device.free * (1 - SPARE_MEMORY)]
    return min(spacious or fitting, key=lambda row: row.step_s / row.batches.total, default=None)


def plan_folder(parts: RunParts) -> Path:
    """The job's own folder, below that of the run that is meant; where that has no name one is made."""
    run = parts.settings.run
    folder, _ = choose_path(expand_home(run.root), run.name, run.dir, "plan", parts.machine.launch)
    path = resolve_links(folder) / "plan"
    refuse_unsafe_files(make_folder(path))
    (path / "plan.json").unlink(missing_ok=True)  # of an earlier one, should this one be killed
    return path
