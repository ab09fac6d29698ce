"""Does one rank hold up all the others? What each of them spends by itself is compared: all wait for the slowest."""

from __future__ import annotations

import socket
from statistics import median

import torch

from trainer.parallel.buckets import Totals
from trainer.parallel.ranks import Ranks
from trainer.strategies.stopwatch import STEP, StepTimer

STEPS, SECONDS = 10, 2.0  # what is judged at once: lines of so many steps at least, which took so long
THRESHOLD = 0.25  # of the time, by which a rank is above the others: without it steps would be so much shorter
CAUSES = ("stood still (stopped, swapped out, or without a processor)", "read its data", "computed")
COMPUTED = 2  # the last cause, which says something among ranks of equal work alone
_CPU = torch.device("cpu")


class StragglerCheck:
    """How fast the ranks of one loop are: of each, how long it stood still, read its data, and computed.

    Nothing of it is waiting for others. One that is alone holds up nobody.
    """

    def __init__(self, ranks: Ranks, stage: int, on_cpu: bool) -> None:
        """Collective. `stage`: which one of a pipeline this rank has: ranks of another have other work."""
        self._ranks, self._on_cpu = ranks, on_cpu
        told = ranks.all_gather_values((socket.gethostname(), stage))  # all ranks, once
        self._hosts, self._stages = [host for host, _ in told], [stage for _, stage in told]
        # (ranks, causes, then seconds of all phases and steps): what was heard since the last judgement
        self._seen = torch.zeros(ranks.size, len(CAUSES) + 2, dtype=torch.float64)
        self._before = torch.zeros_like(self._seen[0])  # what this rank's watch had counted at the last line
        self._under_way: Totals | None = None
        self._slow: set[int] = set()  # ranks that were told of, and are not well yet

    def tell(self, watch: StepTimer) -> None:
        """Collective, at a line: start telling all ranks what this one spent since the last line."""
        # a processor's time says how slow it is; beside a GPU it says nothing, for it spins while it waits
        computed = watch.worked / torch.get_num_threads() if self._on_cpu else 0.0
        stood, whole = (sum(times[phase] for phase in STEP) for times in (watch.stood, watch.spent))
        now = self._before.new_tensor([stood, watch.spent["data"], computed, whole, watch.measured])
        now *= watch.measured > 0  # after the first step the watch begins anew
        table = torch.zeros_like(self._seen)
        table[self._ranks.rank], self._before = now - self._before, now
        self._under_way = Totals({"": table}, self._ranks, _CPU)  # all ranks; each fills in its row, 40 bytes

    def heard(self) -> list[str]:
        """After what was told has arrived: a sentence for each rank that has begun to hold up the others."""
        if self._under_way is None:
            return []
        self._seen += self._under_way.read()[""]
        self._under_way = None
        seconds, steps = self._seen[:, len(CAUSES) :].amax(0).tolist()
        if steps < STEPS or seconds < SECONDS:
            return []
        parts = (self._seen[:, : len(CAUSES)] / seconds).tolist()  # rank → cause → part of the time
        self._seen.zero_()
        return [said for rank, own in enumerate(parts) for said in self._judge(rank, own, parts)]

    def _judge(self, rank: int, own: list[float], parts: list[list[float]]) -> list[str]:
        """What is new of a rank: who is slow is told once, and again only after it was well."""
        others = [at for at in range(len(parts)) if at != rank]
        rest = others or [rank]  # one that is alone is compared with itself
        alike = [at for at in others if self._stages[at] == self._stages[rank]] or [rank]
        usual = [median(parts[at][cause] for at in (alike if cause == COMPUTED else rest)) for cause in range(len(own))]
        far, cause = max((mine - theirs, cause) for cause, (mine, theirs) in enumerate(zip(own, usual, strict=True)))
        new = far > THRESHOLD and rank not in self._slow
        self._slow = self._slow | {rank} if far > THRESHOLD else self._slow - {rank}
        return [
            f"rank {rank} on {self._hosts[rank]} holds up the others: it {CAUSES[cause]} for {100 * own[cause]:.0f} %"
            f" of the time, they for {100 * usual[cause]:.0f} %"
        ] * new
