"""A roll call of the ranks, through the store: who is there, how far, and doing what? Nothing is sent until one calls.

A thread of every rank listens and answers, whatever its main thread does. Who does not answer is stopped, or gone.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.polling import poll
from trainer.launch.rendezvous import Launch
from trainer.launch.store_collectives import machine_id

if TYPE_CHECKING:
    from torch.distributed import Store

_MOST_RANKS = 16  # ranks that an account names
_LEAVE_TIMEOUT = 2.0  # seconds in which whoever runs has heard of the end


@dataclass(frozen=True)
class RollCallAnswer:
    """One rank's answer."""

    step: int  # that is under way, or was done last
    laps: int  # phases of steps that were done: who has done fewer is behind
    line: str  # what its main thread is doing
    waits: bool  # for other ranks, as far as that line tells


class RollCall:
    """One rank's side of it. Each thread needs one of its own: a store's connection answers one question at a time."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self.launch, self.store = launch, store.clone()

    def enter(self) -> None:
        """Say which process this rank is."""
        self.store.set(f"process-{self.launch.rank}", json.dumps([_process_namespace(), os.getpid()]))

    def call(self, number: int) -> bool:
        """Ask all ranks to answer; is this the first that does? It is the one to listen to the answers."""
        first = self.store.add(f"callers-{number}", 1) == 1
        if first:
            self.store.set("call", str(number))
        return first

    def heard(self) -> int:
        """The number of the last call, from 1 on; 0: nobody has called."""
        return int(self.store.get("call")) if self.store.check(["call"]) else 0

    def answer(self, number: int, present: RollCallAnswer) -> None:
        """Be there."""
        self.store.set(f"present-{number}-{self.launch.rank}", json.dumps(asdict(present)))

    def answers(self, number: int, seconds: float) -> dict[int, RollCallAnswer]:
        """Of each rank that answers within so long. Nobody waits for those that are stopped."""
        keys = [f"present-{number}-{rank}" for rank in range(self.launch.world_size)]

        def all_heard() -> bool | None:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return all(self.stopped(rank) for rank in missing) or None

        poll(all_heard, seconds)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        return {rank: RollCallAnswer(**json.loads(self.store.get(key))) for rank, key in there.items()}

    def stopped(self, rank: int) -> bool:
        """Is it certain that the rank's process is stopped? Only of one on this machine, and on Linux."""
        with suppress(OSError):
            return _process_state(self._process(rank)) == "T"
        return False

    def part(self, blamed: int | None) -> None:
        """Be about to end. Who serves the store waits for the others; the blamed one, if stopped, is made to run."""
        self.store.set(f"parted-{self.launch.rank}", "")
        if self.launch.rank0_serves_store and self.launch.is_main:
            others = [f"parted-{rank}" for rank in range(1, self.launch.world_size) if rank != blamed]
            poll(lambda: not others or self.store.check(others) or None, _LEAVE_TIMEOUT)
        # last of all, so that it finds nobody to go on with: it hears that the run is over, and ends. It may be gone
        # already, or another user's; to a process that runs the signal means nothing
        with suppress(ProcessLookupError, PermissionError):
            if blamed is not None and (pid := self._process(blamed)):
                os.kill(pid, signal.SIGCONT)

    def _process(self, rank: int) -> int:
        """The process of a rank on this machine; 0: it is elsewhere, or has never come."""
        if not self.store.check([f"process-{rank}"]):
            return 0
        where, pid = json.loads(self.store.get(f"process-{rank}"))
        return pid if where == _process_namespace() else 0


def _process_namespace() -> str:
    """What processes have in common that can see each other: containers on one machine may not."""
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_id()


def _process_state(pid: int) -> str:
    """How a process is, in Linux' letter: R runs, S sleeps, T was stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""


def find_blocking_ranks(present: Mapping[int, RollCallAnswer], size: int) -> tuple[list[int], str]:
    """Which ranks hold the others up, and how that is known; none where all wait for each other."""
    silent = [rank for rank in range(size) if rank not in present]
    if silent:
        return silent, "does not answer: its process is stopped, or its machine is gone"
    furthest = max(one.laps for one in present.values())
    if behind := [rank for rank, one in present.items() if one.laps < furthest]:
        return behind, "is behind the others"
    # in the same phase of the same step: some wait in it, and some do something else
    busy = [rank for rank, one in present.items() if not one.waits]
    return (busy, "does not come to where the others wait") if len(busy) < size else ([], "")


def describe_blocking_rank(present: Mapping[int, RollCallAnswer], size: int) -> tuple[int | None, str]:
    """The first of those ranks, and the sentence about them."""
    ranks, why = find_blocking_ranks(present, size)
    if not ranks:
        return None, "no rank gets further, and none is behind: the network between them, or a device"
    others = f", and so rank {', '.join(map(str, ranks[1:_MOST_RANKS]))}" if len(ranks) > 1 else ""
    line = f" ({present[ranks[0]].line})" if ranks[0] in present else ""
    return ranks[0], f"rank {ranks[0]} of {size} {why}{line}{others}"


def format_answers(present: Mapping[int, RollCallAnswer], size: int, first: int | None) -> str:
    """A line for each rank, the blamed one first."""
    order = sorted(range(size), key=lambda rank: (rank != first, rank in present, rank))[:_MOST_RANKS]
    said = {rank: f"step {one.step}, {one.line}" for rank, one in present.items()}
    return "\n".join(f"  rank {rank}: {said.get(rank, 'no answer')}" for rank in order)
