"""Where a run's time goes, step by step; and how long its process stood still."""

from __future__ import annotations

import socket
from collections.abc import Callable
from statistics import median
from threading import Thread
from time import monotonic, perf_counter, process_time, sleep
from typing import Any
from weakref import ref

import torch
from typing_extensions import override

from trainer.data.nested_tensors import first_tensor
from trainer.parallel.buckets import PendingSums
from trainer.parallel.ranks import Ranks

STEP_PHASES = ("data", "forward and backward", "communication", "optimizer", "log")  # of every step, in order of time
PHASES = (*STEP_PHASES, "evaluation", "save")


class StepTimer:
    """Laps of the host's clock. They cost some microseconds a step and never wait for a device."""

    def __init__(self, stalls: NoStallClock) -> None:
        self.steps, self._stalls = 0, stalls  # steps that have begun
        self.done = 0  # phases, and batches of evaluations: where it stands still nothing goes on
        self._begin()
        self._since, self._stood, self._worked = perf_counter(), 0.0, 0.0

    def _begin(self) -> None:
        # seconds, since the second step began: of the clock, and in which this process stood still
        self.elapsed, self.stalled = (dict.fromkeys(PHASES, 0.0) for _ in range(2))
        self.cpu_seconds = 0.0  # of the processors, in forward and backward

    @property
    def measured(self) -> int:
        """How many steps it is about: all but the first, which compiles, allocates and opens files."""
        return max(self.steps - 1, 0)

    @property
    def laps(self) -> dict[str, float]:
        """Seconds by phase of the steps that are measured; none before the second of them."""
        return self.elapsed if self.measured else {}

    def step(self) -> None:
        """A step begins: what passed since the last one ended went into its data."""
        self.lap("data")
        self.steps += 1
        if self.steps == 2:
            self._begin()
        self._worked = process_time()

    def end_forward_backward(self) -> None:
        """A lap of forward and backward; of these the processors' time is known, too, which costs a microsecond."""
        self.cpu_seconds += process_time() - self._worked
        self.lap("forward and backward")

    def lap(self, phase: str) -> None:
        """What passed since the last lap went into this phase."""
        now, stood = perf_counter(), self._stalls.seconds
        self.elapsed[phase] += now - self._since
        self.stalled[phase] += stood - self._stood
        self._since, self._stood = now, stood
        self.done += 1


_TICK = 0.025  # seconds from tick to tick
_MIN_LATE = 0.05  # a tick that is later than that tells of more than a busy machine


class NoStallClock:
    """Nobody looks, for nobody waits for this process."""

    seconds = 0.0


class StallClock(NoStallClock):
    """A thread that only sleeps and looks at the clock: what its ticks are late by, the process stood still.

    40 ticks a second cost about 0.1 % of a core. The thread ends with this object.
    """

    def __init__(self) -> None:
        Thread(target=_tick, args=(ref(self),), name="stalls", daemon=True).start()


def _tick(owner: ref[StallClock]) -> None:
    while True:
        before = monotonic()
        sleep(_TICK)  # not for an event: time itself is what is measured
        late = monotonic() - before - _TICK
        stalls = owner()
        if stalls is None:
            return
        stalls.seconds += late if late > _MIN_LATE else 0.0
        del stalls  # or the thread would keep it through the next sleep


MIN_STEPS, MIN_SECONDS = 10, 2.0  # what is judged at once: lines of so many steps at least, which took so long
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
        self._under_way: PendingSums | None = None
        self._slow: set[int] = set()  # ranks that were told of, and are not well yet

    def start(self, watch: StepTimer) -> None:
        """Collective, at a line: start telling all ranks what this one spent since the last line."""
        # a processor's time says how slow it is; beside a GPU it says nothing, for it spins while it waits
        computed = watch.cpu_seconds / torch.get_num_threads() if self._on_cpu else 0.0
        stood, whole = (sum(times[phase] for phase in STEP_PHASES) for times in (watch.stalled, watch.elapsed))
        now = self._before.new_tensor([stood, watch.elapsed["data"], computed, whole, watch.measured])
        now *= watch.measured > 0  # after the first step the watch begins anew
        table = torch.zeros_like(self._seen)
        table[self._ranks.rank], self._before = now - self._before, now
        self._under_way = PendingSums({"": table}, self._ranks, _CPU)  # all ranks; each fills in its row, 40 bytes

    def read(self) -> list[str]:
        """After what was told has arrived: a sentence for each rank that has begun to hold up the others."""
        if self._under_way is None:
            return []
        self._seen += self._under_way.read()[""]
        self._under_way = None
        seconds, steps = self._seen[:, len(CAUSES) :].amax(0).tolist()
        if steps < MIN_STEPS or seconds < MIN_SECONDS:
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


class NoUtilization:
    """Nobody has counted what a step computes."""

    def metrics(self, inputs: Any, seconds: float) -> dict[str, float]:
        """What a training line says of it. inputs: of a micro-batch of the last step; seconds: of a step."""
        return {}


class Utilization(NoUtilization):
    """The operations of a step of the whole network, beside the most that all devices together can do.

    Chowdhery et al. 2022, arXiv:2204.02311, appendix B: forward and backward count, what is computed again does not.
    """

    def __init__(self, flops: float, peak: float, inputs: Any, say: Callable[[str], None]) -> None:
        """flops: of a step; peak: a second; inputs: such as the step was counted with; say: tells a sentence."""
        self._flops, self._peak, self._say = flops, peak, say
        self._counted = first_tensor(inputs).shape[1:]  # of a sample

    @override
    def metrics(self, inputs: Any, seconds: float) -> dict[str, float]:
        """The utilisation, 0 to 1; from the first samples of another size on nothing, for those were not counted."""
        if self._peak and first_tensor(inputs).shape[1:] != self._counted:
            self._peak = 0.0
            self._say("note        no utilisation from here on: the samples are not all of one size")
        return {"utilisation": self._flops / seconds / self._peak} if self._peak else {}
