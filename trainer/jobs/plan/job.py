"""The job `plan`: what each strategy would take on so many devices, for the user's own network, data and optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from trainer.jobs.plan.choice import TIME_ERROR, RowChoice, choose_row
from trainer.jobs.plan.devices import Device, find_device, with_keys
from trainer.jobs.plan.measured_device import DoctorFile, describe_doctor, measured_device, read_doctor_file
from trainer.jobs.plan.plot import plot_plan
from trainer.jobs.plan.report import Row, advise, format_plan_table, row_facts
from trainer.jobs.plan.search import LATE, PlanSearch
from trainer.jobs.preparation import read_data_sets
from trainer.jobs.run_parts import Job, RunParts
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file, resolve_links
from trainer.messages import Refusal, expand_home
from trainer.records.run_folder import choose_path
from trainer.strategies.candidates import Candidate, candidates

SPARE_MEMORY = 0.2  # of a device's memory, which the chosen strategy leaves for what is not counted
SPARE_AFTER_DOCTOR = 0.1  # where the memory was measured
AS_NAMED = "own"  # the strategy that the command line names, as it is


class PlanJob(Job):
    """Try every strategy on tensors without values, and say what it takes: memory, bytes on the wire, time."""

    def __init__(
        self,
        processes: Sequence[int] = (1, 2, 4, 8),
        device: str = "cpu",
        strategies: Sequence[str] | None = None,
        seconds: float = 50,
        spare: float | None = None,
        doctor: str | bool | None = None,
        memory: float | None = None,
        flops: float | None = None,
        bandwidth: float | None = None,
        inside: float | None = None,
        between: float | None = None,
        per_machine: int | None = None,
    ) -> None:
        if not processes or min(processes) < 1:
            raise Refusal("job.processes: numbers of processes, 1 or more: job.processes=[1,8]")
        if spare is not None and not 0 <= spare < 1:
            raise Refusal(f"job.spare={spare}: a part of the memory, at least 0 and below 1: job.spare=0.2")
        self.counts, self.names, self.seconds = sorted({*processes}), strategies, seconds
        self.spare, self.doctor = spare, doctor
        keys = {"memory": memory, "flops": flops, "bandwidth": bandwidth, "inside": inside, "between": between}
        self.keys = {**keys, "per_machine": per_machine}
        self.device = find_device(device, self.keys)

    def __call__(self, parts: RunParts) -> int:
        """Plan for each number of processes; the exit code. Refusal where nothing can be planned."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job=plan: one process plans for all; leave out processes and torchrun")
        if not hasattr(os, "fork"):
            raise Refusal("job=plan tries each strategy in a copy of its process, which this system cannot make (fork)")
        out = plan_folder(parts)
        torch.set_num_threads(1)  # a process that has started threads cannot be copied safely
        data_sets = read_data_sets(parts)
        doctor = read_doctor_file(self.doctor, expand_home(parts.settings.run.root), self.device)
        if doctor is not None:
            print(f"measured    {describe_doctor(doctor)}")
        spare = self.spare if self.spare is not None else SPARE_AFTER_DOCTOR if doctor else SPARE_MEMORY
        rows: list[Row] = []
        refused: dict[str, str] = {}
        device = self.device
        for count in self.counts:
            device = self._measured(doctor, count)
            search = PlanSearch(parts, data_sets, device, spare, monotonic() + self.seconds)
            planned = search.run(list(self._candidates(parts, count)), count)
            rows += planned
            refused = search.refused
            print("\n".join(format_plan_table(planned, search.refused, device)), flush=True)
        facts = plan_facts(rows, self.counts[-1], device, spare)
        if not rows and LATE in refused.values():
            facts["why"] = f"is not known, as nothing was tried in time; try job.seconds={4 * self.seconds:g}"
        facts |= {"refused": refused, "doctor": str(doctor.path) if doctor else None}
        for line in advise(rows, facts, device):
            print(line)
        replace_file(out / "plan.json", json.dumps(facts, indent=1) + "\n")
        print(f"written     {out / 'plan.json'}")
        if rows:
            plot_plan(facts["rows"], device.name, device.free).save(out / "plan.png")
            print(f"written     {out / 'plan.png'}")
        return 0

    def _measured(self, doctor: DoctorFile | None, count: int) -> Device:
        """The device of a plan for so many processes; what keys say goes before what was measured."""
        return with_keys(measured_device(self.device, doctor, count), self.keys) if doctor else self.device

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
            yield Candidate("", replace(parts.strategy, machine=machine), None)
        for candidate in candidates(parts.strategy, machine, per_machine):
            if self.names is None or candidate.name in self.names:
                yield candidate


def plan_facts(rows: Sequence[Row], processes: int, device: Device, spare: float) -> dict[str, Any]:
    """The content of plan.json; the choice is that for so many processes."""
    every = [row_facts(row) for row in rows]
    chosen: RowChoice | None = None
    try:
        margin = inf if device.is_host else TIME_ERROR  # on CPUs times are not sure enough to choose by
        chosen = choose_row([row for row in every if row["processes"] == processes], device.free, spare, margin)
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
    }


def plan_folder(parts: RunParts) -> Path:
    """The job's own folder, below that of the run that is meant; where that has no name one is made."""
    run = parts.settings.run
    folder, _ = choose_path(expand_home(run.root), run.name, run.dir, "plan", parts.machine.launch)
    path = resolve_links(folder) / "plan"
    refuse_unsafe_files(make_folder(path))
    (path / "plan.json").unlink(missing_ok=True)  # of an earlier one, should this one be killed
    return path
