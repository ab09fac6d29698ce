"""The job `doctor`: examine what a run would use, before it does."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

from trainer.jobs.doctor.clock_offset import judge_offsets, measure_offsets
from trainer.jobs.doctor.collectives import OPS, make_groups, plan_groups, time_collectives
from trainer.jobs.doctor.findings import ExaminedRanks
from trainer.jobs.doctor.host_facts import collect_host_facts, is_crowded, judge_facts, machine_and_network
from trainer.jobs.doctor.links import Expectations, judge_links, pair_rounds, remeasure_slow_links, time_links
from trainer.jobs.doctor.report import (
    FILE,
    Examination,
    judge_collectives,
    parse_baseline,
    read_baseline,
    report_data,
    report_lines,
    write_report,
)
from trainer.jobs.doctor.shared_folder import examine_folder
from trainer.jobs.doctor.slow_rank import BLOCKS, judge_rates, judge_speed, measure_rates, prepare_work, run_block
from trainer.launch.hang_detection import RankWatchdog
from trainer.launch.main_thread_watchdog import RankProgress
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import make_folder
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.messages import Refusal
from trainer.parallel.process_group import join_group, leave_group
from trainer.parallel.ranks import Ranks
from trainer.strategies.machine import Machine

_JOIN = timedelta(seconds=120)  # in which all ranks must have connected; and of each collective
_HANG = 30.0  # seconds in which each measurement gets further
_PARTS = BLOCKS - 2  # of the collectives, with a block of the ranks' own work after each


class Doctor:
    """Examine machines, network and folder; exit 1 where something would hold up or break a run."""

    def __init__(self, seconds: float = 5.0) -> None:
        if seconds <= 0:
            raise Refusal(f"job.seconds={seconds:g}: seconds for the collectives, above 0")
        self.seconds = seconds

    def __call__(self, machine: Machine, folder: Path) -> int:
        """Examine; the exit code. folder: where runs are, in which doctor.json is written."""
        launch = machine.launch
        # rank 0 decides, for others may stand in another folder
        before, at = broadcast_from_main(launch, "doctor", lambda: (read_baseline(folder), make_scratch(folder)))
        scratch = Path(at)
        site = join_examined_ranks(machine)
        with hang_watchdog(launch, scratch, site):
            examination = self._examine(site, machine, scratch, before)
        if launch.is_main:
            data = report_data(examination, before)
            path = write_report(folder, data)
            print(*report_lines(examination), f"written     {path}", sep="\n", flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
        if launch.world_size > 1:
            leave_group(site.world, clean=True)
        return int(any(finding.level == "error" for finding in examination.findings))

    def _examine(
        self, site: ExaminedRanks, machine: Machine, scratch: Path, baseline: Mapping[str, Any]
    ) -> Examination:
        """Collective: everything, one thing after the other; the same on all ranks."""
        began = monotonic()
        # all ranks; versions, limits and addresses of each one's host
        facts = site.world.all_gather_values(collect_host_facts(site.device, machine.interface))
        last = parse_baseline(baseline, site, facts)
        reports, findings = examine_folder(site, scratch)
        findings += judge_facts(site, facts)

        # the ranks' own speed is measured between all else, so that what lasts a moment only is no verdict
        offsets, work = measure_offsets(site), prepare_work(site)
        findings += judge_offsets(site, offsets)
        links, times, groups = [], [], plan_groups(site)
        run_block(site, work, offsets[site.world.rank])
        if site.world.size > 1:
            # links by themselves, then collectives over all groups that a strategy may use
            links = time_links(site, pair_rounds(site.world.size))
            run_block(site, work, offsets[site.world.rank])
            expectations = Expectations(site, links, last.links, min(each.network_rate for each in facts))
            links = remeasure_slow_links(site, links, expectations)
            findings += judge_links(site, links, expectations)
            mine = make_groups(site, groups)
            cells = [(name, op) for name in mine for op in OPS]
            for part in range(_PARTS):
                chosen = cells[part::_PARTS]
                times += time_collectives(site, mine, chosen, self.seconds / _PARTS)
                if part < _PARTS - 1:
                    run_block(site, work, offsets[site.world.rank])
            # group by group, each collective from the smallest size to the largest
            times.sort(key=lambda each: (list(groups).index(each.group), list(OPS).index(each.op), each.bytes))
        run_block(site, work, offsets[site.world.rank])  # the last of BLOCKS
        findings += judge_speed(site, work, is_crowded(site, facts))
        findings += judge_collectives(times, last)
        rates = site.world.all_gather_values(measure_rates(site, work))  # all ranks; a few numbers each
        findings += judge_rates(site, [each.device for each in facts], rates)
        took = monotonic() - began
        return Examination(site, facts, reports, offsets, rates, links, groups, times, findings, took)


def make_scratch(folder: Path) -> str:
    """A new folder in this one, for what all ranks try there, and for logs if one hangs."""
    try:
        return mkdtemp(prefix=".doctor-", dir=make_folder(folder))
    except OSError as error:
        raise Refusal(
            f"job=doctor examines {folder} and writes {FILE} into it, which fails: {error.strerror}; give another"
            " run.root, or a run.dir"
        ) from None


def join_examined_ranks(machine: Machine) -> ExaminedRanks:
    """Collective: all ranks in one group, and what they know of each other."""
    device, launch = machine.claim_device(), machine.launch
    world = join_group(launch, device, machine.backend, _JOIN) if launch.world_size > 1 else Ranks()
    names = world.all_gather_values((socket.gethostname(), machine_and_network()))  # all ranks; two names each
    return ExaminedRanks(world, device, [host for host, _ in names], [name for _, name in names])


def hang_watchdog(launch: Launch, folder: Path, site: ExaminedRanks) -> AbstractContextManager[Any]:
    """Inside, a rank that hangs is named, and all end. folder: for the stacks of all threads, which stay there then."""
    if launch.world_size == 1:
        return nullcontext()
    if launch.is_main:
        make_folder(folder / "logs")
    return RankWatchdog(launch, folder, StopRequest(launch), lambda: RankProgress(0, site.progress, _HANG, _HANG / 2))
