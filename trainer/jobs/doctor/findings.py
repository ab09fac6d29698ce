"""What the doctor finds, and the ranks and the device that it examines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from trainer.messages import format_names
from trainer.parallel.ranks import Ranks

Level = Literal["error", "warning", "note"]  # an error makes the exit code 1
_NAMED = 8  # ranks that one finding names


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, and where."""

    level: Level
    what: str
    rank: int | None = None  # the rank that it is about; None: it is about no single rank
    host: str | None = None


@dataclass
class ExaminedRanks:
    """The ranks that are examined, and the device of this one. Every method is called by all ranks alike."""

    world: Ranks
    device: torch.device
    hosts: list[str]  # of each rank, as people know it
    machines: list[str]  # of each rank: what processes have in common that share a machine and its network
    progress: int = field(default=0)  # measurements that are done; the watchdog looks at it

    def where(self, rank: int) -> str:
        """A rank, as a finding names it."""
        return f"rank {rank} on {self.hosts[rank]}"

    def finding(self, level: Level, what: str, rank: int) -> Finding:
        """A finding about one rank."""
        return Finding(level, f"{self.where(rank)} {what}", rank, self.hosts[rank])

    def synchronize(self) -> None:
        """Wait until the device has done what it was given. A CPU has done it already."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def begin(self) -> None:
        """Collective: let all ranks begin the next measurement together."""
        self.synchronize()
        self.world.barrier()  # all ranks; 4 bytes each
        self.progress += 1

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Collective: each of these times, of the rank that took longest for it."""
        times = torch.tensor(seconds, dtype=torch.float64)  # (measurements,)
        self.world.all_reduce_max_(times).wait()  # all ranks; 8 bytes a measurement
        return times.tolist()

    def first_ranks(self) -> list[int]:
        """The first rank of each machine."""
        return [self.machines.index(machine) for machine in dict.fromkeys(self.machines)]


def find_unusual(
    site: ExaminedRanks, values: Sequence[object], sentence: Callable[[object, object], str], level: Level
) -> list[Finding]:
    """A finding for each value that is not the most common one, about the first rank that has it.

    values: one of each rank. sentence: what to say of a value, and of the most common one.
    """
    usual, _ = Counter(values).most_common(1)[0]
    unusual: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            unusual.setdefault(value, []).append(rank)
    findings = []
    for value, ranks in unusual.items():
        others = f" (and so rank {format_names(map(str, ranks[1:]), _NAMED)})" if ranks[1:] else ""
        findings.append(site.finding(level, sentence(value, usual) + others, ranks[0]))
    return findings
