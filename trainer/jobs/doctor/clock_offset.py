"""How far the clocks of the ranks are apart, by the round trip that took least."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from trainer.jobs.doctor.findings import ExaminedRanks, Finding

_PINGS, _PINGS_OF_ALL, _FEWEST = 20, 4000, 3  # round trips with each rank; of all together; at least
_LARGE = 0.1  # seconds


def clock() -> float:
    """The time of this machine, in seconds since the epoch."""
    return time.time()


def measure_offsets(site: ExaminedRanks) -> list[float]:
    """Collective: by how many seconds the clock of each rank is ahead of rank 0's."""
    size = site.world.size
    pings = max(_FEWEST, min(_PINGS, _PINGS_OF_ALL // size))
    message = torch.zeros(1, dtype=torch.float64)
    trips: list[tuple[float, float]] = [(0.0, 0.0)]  # of each rank: its shortest round trip, and its offset
    site.begin()
    # rank 0 asks one rank after the other; 8 bytes there and 8 back
    for rank in range(1, size):
        if site.world.is_main:
            trips.append(min(_ask(rank, message) for _ in range(pings)))
        elif site.world.rank == rank:
            for _ in range(pings):
                dist.recv(message, 0)
                message[0] = clock()
                dist.send(message, 0)
    offsets = torch.tensor([offset for _, offset in trips] if site.world.is_main else [0.0] * size).double()
    site.world.broadcast_(offsets)  # all ranks; 8 bytes a rank
    return offsets.tolist()


def _ask(rank: int, message: torch.Tensor) -> tuple[float, float]:
    """A round trip to this rank: how long it took, and how far ahead that clock was in the middle of it."""
    asked = clock()
    dist.send(message, rank)
    dist.recv(message, rank)
    answered = clock()
    return answered - asked, message.item() - (asked + answered) / 2


def judge_offsets(site: ExaminedRanks, offsets: list[float]) -> list[Finding]:
    """A finding for the first rank of each clock that is far from rank 0's."""
    clocks: dict[tuple[str, float], int] = {}  # ranks of one machine have one clock, unless a container changes it
    for rank, offset in enumerate(offsets):
        if abs(offset) > _LARGE:
            clocks.setdefault((site.machines[rank], round(offset, 1)), rank)
    return [
        site.finding(
            "warning",
            f"has a clock that is {abs(offsets[rank]):.3g} s {'ahead of' if offsets[rank] > 0 else 'behind'} that of"
            " rank 0: times in logs cannot be compared; let all machines use one time server (chrony, ntpd)",
            rank,
        )
        for rank in clocks.values()
    ]
