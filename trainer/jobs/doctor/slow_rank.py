"""Is one rank slower than the others? All do equal work without any collective; then they are seen to arrive at one.

Steps of a run hide it: there every rank takes as long as the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from trainer.jobs.doctor.clock_offset import clock
from trainer.jobs.doctor.findings import ExaminedRanks, Finding
from trainer.jobs.flops import peak_flops

BLOCKS, ROUNDS = 5, 16  # blocks of rounds, far apart in time; what lasts for one block only is chance
_PIECE = 2e-3  # seconds that a rank works in a round: shorter than the turn that a scheduler gives a process
_SLOW = 1.1  # times as long as the others: more is a slow rank
_LATE = 0.25  # of the work, by which a rank arrives after the others though it computes as fast
_OF_DATA_SHEET = 0.4  # of what a device can do by its data sheet; less is a device that is held back
_COPY = 2**26  # bytes of a copy that measures memory: more than a cache holds


@dataclass
class LocalWork:
    """Work that is the same on all ranks, and what is known of it after some blocks."""

    left: Tensor  # (n, n)
    right: Tensor  # (n, n)
    product: Tensor  # (n, n)
    repeats: int = 1  # products in a piece
    fastest: list[list[float]] = field(default_factory=list)  # of each block, of each rank: seconds of its best piece
    lateness: list[list[float]] = field(default_factory=list)  # the same: by how much it comes after the middle one


def multiply(work: LocalWork) -> None:
    """One piece of work."""
    for _ in range(work.repeats):
        torch.mm(work.left, work.right, out=work.product)


def prepare_work(site: ExaminedRanks) -> LocalWork:
    """Collective: matrices, and how many products make a piece; the same on all ranks, so that times compare."""
    size, dtype = (256, torch.float32) if site.device.type == "cpu" else (4096, torch.bfloat16)
    left, right = (torch.ones(size, size, dtype=dtype, device=site.device) for _ in range(2))  # (n, n)
    work = LocalWork(left, right, torch.empty_like(left))
    site.begin()
    best = min(_timed(site, work) for _ in range(8))
    work.repeats = max(1, round(_PIECE / site.slowest([best])[0]))
    return work


def _timed(site: ExaminedRanks, work: LocalWork) -> float:
    """Seconds of one piece. On a CPU those of the processor: on a busy machine others have it in between."""
    now = thread_time if site.device.type == "cpu" else perf_counter
    began = now()
    multiply(work)
    site.synchronize()
    return now() - began


def run_block(site: ExaminedRanks, work: LocalWork, offset: float) -> None:
    """Collective: some rounds of work and waiting for each other. offset: of this rank's clock, in seconds."""
    seconds, arrivals = [], []
    for _ in range(ROUNDS):
        site.begin()
        seconds.append(_timed(site, work))
        arrivals.append(clock() - offset)  # by the clock of rank 0
    times = torch.tensor([min(seconds), *arrivals], dtype=torch.float64)  # (1 + rounds,)
    table = torch.stack(site.world.all_gather(times))  # (ranks, 1 + rounds): all ranks; 136 bytes each
    work.fastest.append(table[:, 0].tolist())
    # the median over rounds of how long after the middle rank each one came
    late = table[:, 1:] - table[:, 1:].quantile(0.5, dim=0)
    work.lateness.append(late.quantile(0.5, dim=1).tolist())


def judge_speed(site: ExaminedRanks, work: LocalWork, crowded: bool) -> list[Finding]:
    """A finding for each rank that was slower than the others in most blocks, and in its best one.

    crowded: more ranks than processors, where who waits for a processor arrives late by chance.
    """
    if site.world.size == 1:
        return []
    findings = []
    # other programs make any rank slow for a while, but none of them faster: the best of all blocks is the rank's own
    best = [min(times) for times in zip(*work.fastest, strict=True)]
    for rank in range(site.world.size):
        ratios, lateness = [], []
        for fastest, late in zip(work.fastest, work.lateness, strict=True):
            usual = _median_of_others(fastest, rank)
            ratios.append(fastest[rank] / usual)
            lateness.append(late[rank] / usual)
        arrives = f"it arrives {median(lateness):+.0%} of that time after the middle rank"
        if min(median(ratios), best[rank] / _median_of_others(best, rank)) > _SLOW:
            times = f"{sum(ratio > _SLOW for ratio in ratios)} of {len(ratios)} times"
            sentence = (
                f"computes {median(ratios):.2f} times as long as the others for the same work, at {times}; {arrives}."
                " Look at its clock rate, temperature and power limit, and at other programs on that device"
            )
            findings.append(site.finding("error", sentence, rank))
        elif min(lateness) > _LATE and not crowded:
            sentence = (
                f"computes as fast as the others, but is late at each of {len(lateness)} times: {arrives}. Something"
                " takes its processor away: other programs, a quota of the container, swapping"
            )
            findings.append(site.finding("warning", sentence, rank))
    return findings


def _median_of_others(seconds: Sequence[float], rank: int) -> float:
    return median(time for other, time in enumerate(seconds) if other != rank)


def measure_rates(site: ExaminedRanks, work: LocalWork) -> dict[str, Any]:
    """What this rank has computed and can copy: operations and bytes a second, from its best pieces."""
    mine = [block[site.world.rank] for block in work.fastest]
    source = torch.ones(_COPY // 4, device=site.device)  # float32, (bytes / 4,)
    target = torch.empty_like(source)
    copies = []
    for _ in range(4):  # the first one also makes room
        site.synchronize()
        began = perf_counter()
        target.copy_(source)
        site.synchronize()
        copies.append(perf_counter() - began)
    size = work.left.shape[0]
    return {
        "dtype": str(work.left.dtype).removeprefix("torch."),
        "flops": 2 * size**3 * work.repeats / min(mine),
        "work_s": mine,  # of each block, for the same work on all ranks
        "memory_bytes_per_s": 2 * _COPY / min(copies),  # read and written
    }


def judge_rates(site: ExaminedRanks, devices: Sequence[str], rates: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A finding for each rank whose device does much less than its data sheet says. devices, rates: of each rank."""
    findings = []
    for rank, (device, each) in enumerate(zip(devices, rates, strict=True)):
        peak = peak_flops(device, "bf16") if each["dtype"] == "bfloat16" else None
        if peak is not None and each["flops"] < _OF_DATA_SHEET * peak:
            sentence = (
                f"computes {each['flops'] / 1e12:.0f} TFLOP/s, and the data sheet of {device} says {peak / 1e12:.0f}"
            )
            findings.append(site.finding("warning", sentence, rank))
    return findings
