"""The job `plan`: what each strategy would take on so many devices, for the user's own network, data and optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from trainer.jobs.plan.choice import LATE, RowChoice, choose_row
from trainer.jobs.plan.devices import Device, find_device
from trainer.jobs.plan.report import Row, advise, format_plan_table, row_facts
from trainer.jobs.plan.search import PlanSearch
from trainer.jobs.preparation import read_data_sets
from trainer.jobs.run_parts import Job, RunParts
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file, resolve_links
from trainer.messages import Refusal, expand_home
from trainer.records.run_folder import choose_path
from trainer.strategies.candidates import Candidate, candidates

AS_NAMED = "own"  # the strategy that the command line names, as it is


class PlanJob(Job):
    """Try every strategy on tensors without values, and say what it takes: memory, bytes on the wire, about a time."""

    def __init__(
        self,
        processes: Sequence[int] = (1, 2, 4, 8),
        device: str = "cpu",
        strategies: Sequence[str] | None = None,
        seconds: float = 50,
        spare: float = 0.2,
        memory: float | None = None,
        per_machine: int | None = None,
    ) -> None:
        if not processes or min(processes) < 1:
            raise Refusal("job.processes: numbers of processes, 1 or more: job.processes=[1,8]")
        if not 0 <= spare < 1:
            raise Refusal(f"job.spare={spare}: a part of the memory, at least 0 and below 1: job.spare=0.2")
        self.counts, self.names, self.seconds, self.spare = sorted({*processes}), strategies, seconds, spare
        self.device = find_device(device, memory, per_machine)

    def __call__(self, parts: RunParts) -> int:
        """Plan for each number of processes; the exit code. Refusal where nothing can be planned."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job=plan: one process plans for all; leave out processes and torchrun")
        if not hasattr(os, "fork"):
            raise Refusal("job=plan tries each strategy in a copy of its process, which this system cannot make (fork)")
        out = plan_folder(parts)
        torch.set_num_threads(1)  # a process that has started threads cannot be copied safely
        data_sets = read_data_sets(parts)
        rows: list[Row] = []
        refused: dict[str, str] = {}
        for count in self.counts:
            search = PlanSearch(parts, data_sets, self.device, self.spare, monotonic() + self.seconds)
            planned = search.run(list(self._candidates(parts, count)), count)
            rows += planned
            refused = search.refused
            print("\n".join(format_plan_table(planned, search.refused, self.device)), flush=True)
        facts = plan_facts(rows, refused, self.counts[-1], self.device, self.spare)
        if not rows and LATE in refused.values():
            facts["why"] = f"is not known, as nothing was tried in time; try job.seconds={4 * self.seconds:g}"
        for line in advise(rows, facts):
            print(line)
        replace_file(out / "plan.json", json.dumps(facts, indent=1) + "\n")
        print(f"written     {out / 'plan.json'}")
        return 0

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
            float8=False,  # torchao's operators have no shapes here; what is kept has the same size
            compile=None,  # operators are noted one by one, as they run without compilation
            compare_copies=False,  # there are no values to compare
        )
        if self.names is not None and AS_NAMED in self.names:
            yield Candidate("", replace(parts.strategy, machine=machine))
        for candidate in candidates(parts.strategy, machine, per_machine):
            if self.names is None or candidate.name in self.names:
                yield candidate


def plan_facts(
    rows: Sequence[Row], refused: Mapping[str, str], processes: int, device: Device, spare: float
) -> dict[str, Any]:
    """The content of plan.json; the choice, and what was refused, are those for so many processes."""
    every = [row_facts(row) for row in rows]
    chosen: RowChoice | None = None
    try:
        mine = [row for row in every if row["processes"] == processes]
        chosen = choose_row(mine, refused, device.free, spare)
        why = chosen.reason
    except Refusal as refusal:
        why = str(refusal)
    return {
        "device": device.name,
        "free": device.free,
        "spare": spare,
        "rows": every,
        "chosen": chosen.row["words"] if chosen else None,
        "second": chosen.second["words"] if chosen and chosen.second else None,
        "why": why,
        "refused": refused,
    }


def plan_folder(parts: RunParts) -> Path:
    """The job's own folder, below that of the run that is meant; where that has no name one is made."""
    run = parts.settings.run
    folder, _ = choose_path(expand_home(run.root), run.name, run.dir, "plan", parts.machine.launch)
    path = resolve_links(folder) / "plan"
    refuse_unsafe_files(make_folder(path))
    (path / "plan.json").unlink(missing_ok=True)  # of an earlier one, should this one be killed
    return path
