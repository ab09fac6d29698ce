"""What the doctor says: a table on the screen, doctor.json, and how this time compares with last time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

from trainer.jobs.doctor.collectives import OPS, CollectiveTime
from trainer.jobs.doctor.findings import ExaminedRanks, Finding
from trainer.jobs.doctor.host_facts import HostFacts
from trainer.jobs.doctor.links import Link, LinkSpeed, Pair, format_rate, median_link
from trainer.jobs.doctor.shared_folder import FolderReport
from trainer.launch.safe_files import replace_file
from trainer.messages import format_count, format_names, format_seconds

FILE = "doctor.json"
_SLOWER = 3.0  # times as slow as last time


@dataclass
class Examination:
    """All that was measured, on all ranks."""

    site: ExaminedRanks
    facts: list[HostFacts]
    folder: list[FolderReport]
    offsets: list[float]  # seconds, of each rank's clock
    work: list[dict[str, Any]]  # of each rank: what it computes and copies in a second
    links: list[Link]
    groups: Mapping[str, list[list[int]]]
    collectives: list[CollectiveTime]
    findings: list[Finding]
    seconds: float  # that it took


@dataclass(frozen=True)
class Baseline:
    """What an earlier examination of the same ranks has measured."""

    links: Mapping[Pair, LinkSpeed]  # by (sender, receiver)
    collectives: Mapping[tuple[str, int, str], float]  # seconds, by collective, bytes and group


def read_baseline(folder: Path) -> dict[str, Any]:
    """What doctor.json says of the last time that all was well; empty where there is none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads((folder / FILE).read_text())
        # what was found ill is no measure: that of the time before stands beside it
        return _baseline(data) if data["ok"] else dict(data["before"])
    return {}


def _baseline(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a doctor.json that another examination is compared with."""
    ranks = [[rank["host"], rank["device"]] for rank in data["ranks"]]
    return {"ranks": ranks, "links": data["links"], "collectives": data["collectives"]}


def parse_baseline(baseline: Mapping[str, Any], site: ExaminedRanks, facts: Sequence[HostFacts]) -> Baseline:
    """The same as numbers; nothing where it was on other machines or devices."""
    same = baseline.get("ranks") == [[host, each.device] for host, each in zip(site.hosts, facts, strict=True)]
    links, collectives = (baseline[key] if same else [] for key in ("links", "collectives"))
    return Baseline(
        {(each["from"], each["to"]): LinkSpeed(each["latency_s"], each["bytes_per_s"]) for each in links},
        {(each["op"], each["bytes"], each["group"]): each["seconds"] for each in collectives},
    )


def judge_collectives(times: Sequence[CollectiveTime], last: Baseline) -> list[Finding]:
    """A finding for each collective that is much slower than last time."""
    findings = []
    for op, group in dict.fromkeys((each.op, each.group) for each in times):
        largest = max((each for each in times if (each.op, each.group) == (op, group)), key=lambda each: each.bytes)
        before = last.collectives.get((op, largest.bytes, group), inf)
        if largest.seconds > _SLOWER * before:
            took = f"{format_seconds(largest.seconds)}, last time {format_seconds(before)}"
            findings.append(Finding("warning", f"{op} over {group}: {format_size(largest.bytes)} take {took}"))
    return findings


def report_data(examination: Examination, baseline: Mapping[str, Any]) -> dict[str, Any]:
    """The content of doctor.json."""
    e = examination
    return {
        "ok": not any(finding.level == "error" for finding in e.findings),
        "time": time.time(),
        "seconds": round(e.seconds, 3),
        "findings": [asdict(finding) for finding in e.findings],
        "ranks": [
            {"rank": rank, "host": host, **asdict(facts), "clock_offset_s": offset, **work}
            for rank, (host, facts, offset, work) in enumerate(
                zip(e.site.hosts, e.facts, e.offsets, e.work, strict=True)
            )
        ],
        "folder": [
            {"rank": rank, "delay_s": each.delay_s} for rank, each in enumerate(e.folder) if each.delay_s is not None
        ],
        "groups": dict(e.groups),
        "collectives": [asdict(each) for each in e.collectives],
        "links": [
            {"from": link.sender, "to": link.receiver, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for link in e.links
        ],
        "before": dict(baseline),
    }


def write_report(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write doctor.json; an infinite number is null there."""
    path = folder / FILE
    replace_file(path, json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and isinf(value) else value


def report_lines(examination: Examination) -> list[str]:
    """The examination, as it stands on the screen."""
    return [*_host_lines(examination), *_link_lines(examination), *_table(examination), *_verdict(examination)]


def _host_lines(e: Examination) -> list[str]:
    """Machines, the folder, clocks, and what the ranks compute."""
    machines = len(e.site.first_ranks())
    facts, work = e.facts[0], sorted(e.work, key=lambda each: each["flops"])
    versions = facts.versions["packages"]
    delays = [each.delay_s for each in e.folder if each.delay_s is not None]
    hosts = format_names(dict.fromkeys(e.site.hosts), 4)
    rows = [
        f"ranks       {len(e.facts)} on {format_count(machines, 'machine')}: {hosts}",
        f"device      {facts.device}, {format_size(facts.memory)}; torch {versions['torch']}",
        f"limits      {facts.descriptors:,.0f} open files, {format_size(facts.shared_memory)} of shared memory, "
        f"{format_size(facts.locked_memory)} locked",
        f"work        {work[0]['flops'] / 1e9:,.1f} to {work[-1]['flops'] / 1e9:,.1f} GFLOP/s in {work[0]['dtype']}, "
        f"memory {format_rate(min(each['memory_bytes_per_s'] for each in work))} at least",
    ]
    if len(e.facts) > 1:
        rows.append(f"folder      seen by others after {format_seconds(max(delays, default=0.0))} at most")
        rows.append(f"clocks      {format_seconds(max(e.offsets) - min(e.offsets))} apart")
    return rows


def _link_lines(e: Examination) -> list[str]:
    """The middle link, and the slowest one, inside machines and between them."""
    rows = []
    for where, across in (("inside a machine", False), ("between machines", True)):
        same = [link for link in e.links if (e.site.machines[link.sender] != e.site.machines[link.receiver]) == across]
        if same:
            usual, slowest = median_link(same), min(same, key=lambda link: link.bytes_per_s)
            rows.append(
                f"links       {where}: {format_rate(usual.bytes_per_s)}, {format_seconds(usual.latency_s)}; the"
                f" slowest, rank {slowest.sender} to {slowest.receiver}: {format_rate(slowest.bytes_per_s)}"
            )
    return rows


def _table(e: Examination) -> list[str]:
    """A row for each collective over each group: its times by size."""
    if not e.collectives:
        return []
    columns = list(dict.fromkeys(format_size(size) for size in sorted({each.bytes for each in e.collectives})))
    rows = [f"{'group':<16} {'collective':<15}" + "".join(f"{column:>9}" for column in columns)]
    for group, op in dict.fromkeys((each.group, each.op) for each in e.collectives):
        same = [each for each in e.collectives if (each.group, each.op) == (group, op)]
        cells = {format_size(each.bytes): format_seconds(each.seconds) for each in same}
        name = f"{group} ({same[0].ranks})" if op == next(iter(OPS)) else ""
        rows.append(f"{name:<16} {op:<15}" + "".join(f"{cells.get(column, ''):>9}" for column in columns))
    return rows


def _verdict(e: Examination) -> list[str]:
    """The findings, errors last, where they are seen."""
    order = ("note", "warning", "error")
    findings = sorted(e.findings, key=lambda finding: order.index(finding.level))
    errors = sum(finding.level == "error" for finding in findings)
    end = f"ILL: {format_count(errors, 'error')}" if errors else "WELL: nothing was found that would hold up a run"
    return [*(f"{finding.level:<11} {finding.what}" for finding in findings), f"{end} ({e.seconds:.0f} s)"]


def format_size(number: float) -> str:
    """Bytes, for people."""
    if isinf(number):
        return "unlimited"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"
