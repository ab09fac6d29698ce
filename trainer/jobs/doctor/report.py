"""What the doctor says: a table on the screen, doctor.json, and how this time compares with last time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

from trainer.jobs.doctor.collectives import OPS, CollectiveTime
from trainer.jobs.doctor.cost_model import LinearCost, fit_cost, model_cost
from trainer.jobs.doctor.findings import ExaminedRanks, Finding
from trainer.jobs.doctor.host_facts import HostFacts
from trainer.jobs.doctor.links import Link, Pair, format_rate, median_link
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
    kernels: dict[str, Any]  # times of operators
    links: list[Link]
    groups: Mapping[str, list[list[int]]]
    collectives: list[CollectiveTime]
    findings: list[Finding]
    seconds: float  # that it took


@dataclass(frozen=True)
class Baseline:
    """What an earlier examination of the same ranks has measured."""

    links: Mapping[Pair, LinearCost]  # by (sender, receiver)
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
        {(each["from"], each["to"]): LinearCost(each["latency_s"], each["bytes_per_s"]) for each in links},
        {(each["op"], each["bytes"], each["group"]): each["seconds"] for each in collectives},
    )


def median_link_of_group(links: Sequence[Link], members: Iterable[Sequence[int]]) -> LinearCost | None:
    """The middle link between ranks that are in one group together; None: none was measured."""
    blocks = [set(ranks) for ranks in members]
    inside = [link for link in links if any({link.sender, link.receiver} <= block for block in blocks)]
    return median_link(inside) if inside else None


def expected_seconds(each: CollectiveTime, last: Baseline, link: LinearCost | None) -> float | None:
    """What a collective should take: as last time, or else by a model of links like this one."""
    before = last.collectives.get((each.op, each.bytes, each.group))
    if before is not None or link is None:
        return before
    return model_cost(each.op, each.ranks, link).seconds(each.bytes)


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


def report_data(examination: Examination, last: Baseline, baseline: Mapping[str, Any]) -> dict[str, Any]:
    """The content of doctor.json."""
    e = examination
    middle = {name: median_link_of_group(e.links, members) for name, members in e.groups.items()}
    # group by group, each collective from the smallest size to the largest
    order = [(group, op) for group in e.groups for op in OPS]
    times = sorted(e.collectives, key=lambda each: (order.index((each.group, each.op)), each.bytes))
    rows = [{**asdict(each), "expected": expected_seconds(each, last, middle[each.group])} for each in times]
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
        "collectives": rows,
        "fits": _fits(rows),
        "kernels": e.kernels,
        "links": [
            {"from": link.sender, "to": link.receiver, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for link in e.links
        ],
        "before": dict(baseline),
    }


def _fits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """α and β of each collective over each group, and those of the times that are expected."""
    sizes: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        sizes.setdefault((row["group"], row["op"], row["ranks"]), []).append(row)
    fits = []
    for (group, op, ranks), same in sizes.items():
        measured = fit_cost([(row["bytes"], row["seconds"]) for row in same])
        points = [(row["bytes"], row["expected"]) for row in same if row["expected"] is not None]
        expected = asdict(fit_cost(points)) if points else {"alpha_s": None, "bytes_per_s": None}
        named = {f"expected_{key}": value for key, value in expected.items()}
        fits.append({"op": op, "group": group, "ranks": ranks, **asdict(measured), **named})
    return fits


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


def report_lines(examination: Examination, data: Mapping[str, Any]) -> list[str]:
    """The examination, as it stands on the screen."""
    return [*_host_lines(examination), *_link_lines(examination), *_table(data), *_verdict(examination)]


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
                f"links       {where}: {format_rate(usual.bytes_per_s)}, {format_seconds(usual.alpha_s)}; the slowest, "
                f"rank {slowest.sender} to {slowest.receiver}: {format_rate(slowest.bytes_per_s)}"
            )
    return rows


def _table(data: Mapping[str, Any]) -> list[str]:
    """A row for each collective over each group: its times by size, α, β, and what the largest should take."""
    if not data["collectives"]:
        return []
    widths = sorted({row["bytes"] for row in data["collectives"]})
    columns = list(dict.fromkeys(format_size(width) for width in widths))
    head = f"{'group':<16} {'collective':<15}" + "".join(f"{column:>9}" for column in columns)
    rows = [f"{head}{'alpha':>9}{'expected':>10}{'beta':>11}{'expected':>11}"]
    for row in data["fits"]:
        same = [each for each in data["collectives"] if (each["op"], each["group"]) == (row["op"], row["group"])]
        cells = {format_size(each["bytes"]): format_seconds(each["seconds"]) for each in same}
        name = f"{row['group']} ({row['ranks']})" if row["op"] == next(iter(OPS)) else ""
        expected = row["expected_alpha_s"], row["expected_bytes_per_s"]
        rows.append(
            f"{name:<16} {row['op']:<15}"
            + "".join(f"{cells.get(column, ''):>9}" for column in columns)
            + f"{format_seconds(row['alpha_s']):>9}{'' if expected[0] is None else format_seconds(expected[0]):>10}"
            + f"{format_rate(row['bytes_per_s']):>11}{'' if expected[1] is None else format_rate(expected[1]):>11}"
        )
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
