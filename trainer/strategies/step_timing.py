"""One timer of the phases of a step, and what is read from it: stalls, stragglers, the utilisation of the devices.

`StepTimer` reads the host's clock at the end of each phase. Its readers: the table at the end of a run and status.json
(`laps`), the watchdog (`phases_done`), `StragglerCheck` between the ranks, and `Utilization` in a training line.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from statistics import median
from threading import Thread
from time import monotonic, perf_counter, process_time, sleep
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from typing_extensions import override

from trainer.data.nested_tensors import first_tensor
from trainer.parallel.ranks import Ranks, Waitable

STEP_PHASES = ("data", "forward and backward", "communication", "optimizer", "log")  # of every step, in order of time
PHASES = (*STEP_PHASES, "evaluation", "save")


class StepTimer:
    """Seconds by phase, from the host's clock. It costs some microseconds a step and never waits for a device."""

    def __init__(self, stall_clock: NoStallClock) -> None:
        self.steps, self._stall_clock = 0, stall_clock  # steps that have begun
        self.phases_done = 0  # and batches of evaluations: while this number stands still, nothing goes on
        self._reset()
        self._last, self._last_stalled, self._last_cpu = perf_counter(), 0.0, 0.0
        self._apart = 1  # steps from one measurement of the processors' time to the next

    def _reset(self) -> None:
        # since the second step began, in seconds
        self.elapsed = dict.fromkeys(PHASES, 0.0)  # by phase, of the clock
        self.stalled = 0.0  # in which this process stood still, in steps
        self.cpu_seconds = 0.0  # of all processors, in forward and backward

    @property
    def measured(self) -> int:
        """How many steps are measured: all but the first, which compiles, allocates and opens files."""
        return max(self.steps - 1, 0)

    @property
    def laps(self) -> dict[str, float]:
        """Seconds by phase of the measured steps; nothing before the second step."""
        return self.elapsed if self.measured else {}

    def step(self) -> None:
        """A step begins: the time since the last one ended was spent on its data."""
        self.lap("data")
        before, self._last_stalled = self._last_stalled, self._stall_clock.seconds
        self.stalled += self._last_stalled - before
        self.steps += 1
        if self.steps == 2:
            self._reset()
        if self.steps % self._apart == 0:
            self._last_cpu = self._stall_clock.cpu_time()

    def end_forward_backward(self) -> None:
        """The end of forward and backward. Here the processors' time is measured, too."""
        if self.steps % self._apart == 0:
            spent = self._stall_clock.cpu_time() - self._last_cpu
            self.cpu_seconds += spent * self._apart
            # on a busy machine the system may take 40 µs to tell it, which short steps would notice
            self._apart = 1 if spent > _SHORT else 16
        self.lap("forward and backward")

    def lap(self, phase: str) -> None:
        """The end of a phase: the time since the last lap was spent on it."""
        now = perf_counter()
        self.elapsed[phase] += now - self._last
        self._last = now
        self.phases_done += 1

    def lap_between(self, phase: str) -> None:
        """The end of an evaluation or a save. A rank that stood still in it has held up no step."""
        self.lap(phase)
        self._last_stalled = self._stall_clock.seconds


# ----------------------------------------------------------------------------------------------------------- stalls

_SHORT = 0.005  # seconds of a forward and backward
_TICK = 0.025  # seconds from tick to tick
_MIN_LATE = 0.05  # seconds: on a busy machine ticks are late by less


class NoStallClock:
    """Nothing is measured: no other process waits for this one."""

    seconds = 0.0

    def cpu_time(self) -> float:
        """Seconds that the threads of this process have computed; here nobody compares them."""
        return 0.0


class StallClock(NoStallClock):
    """How long this process stood still (stopped, swapped out): a thread sleeps, and counts by how much it is late.

    40 ticks a second cost about 0.1 % of a core. The thread ends with this object.
    """

    def __init__(self) -> None:
        Thread(target=_tick, args=(ref(self),), name="stalls", daemon=True).start()

    @override
    def cpu_time(self) -> float:
        return process_time()


def _tick(owner: ref[StallClock]) -> None:
    while True:
        before = monotonic()
        sleep(_TICK)  # not for an event: time itself is what is measured
        late = monotonic() - before - _TICK
        clock = owner()
        if clock is None:
            return
        clock.seconds += late if late > _MIN_LATE else 0.0
        del clock  # or the thread would keep it alive through the next sleep


# ------------------------------------------------------------------------------------------------------- stragglers

MIN_STEPS, MIN_SECONDS = 10, 2.0  # ranks are compared over at least so many steps that took at least so long
THRESHOLD = 0.25  # part of the time by which a rank is above the others: without it steps would be so much shorter
CAUSES = ("stood still (stopped, swapped out, or without a processor)", "read its data", "computed")
COMPUTED = 2  # the cause that can be compared only among ranks with the same work


class StragglerCheck:
    """Finds a rank that holds up all others, by what each rank spends on its own: stalls, data, computing.

    Time in which a rank waits for others is not in it. In a run of one process nobody is held up.
    """

    def __init__(self, ranks: Ranks, stage: int, on_cpu: bool) -> None:
        """Collective. `stage`: the stage of a pipeline that this rank has: other stages have other work."""
        self._ranks, self._on_cpu = ranks, on_cpu
        # all ranks, once; the main one, which compares, hears of all
        places = ranks.gather_values((socket.gethostname(), stage))
        self._hosts, self._stages = [host for host, _ in places], [stage for _, stage in places]
        # (ranks, causes, then seconds of all phases and steps): the sum since the last comparison; of the main rank
        self._sums = torch.zeros(len(places), len(CAUSES) + 2, dtype=torch.float64)
        self._before = torch.zeros(len(CAUSES) + 2, dtype=torch.float64)  # what this rank's timer had at the last line
        self._pending: tuple[list[Tensor], Waitable] | None = None
        self._slow: set[int] = set()  # ranks that were reported and have not recovered yet

    def start(self, timer: StepTimer) -> None:
        """Collective, at a line: begin to tell the main rank what this one has spent since the last line."""
        # the processors' time says how slow a CPU is; beside a GPU it says nothing, because waiting for it costs time
        computed = timer.cpu_seconds / torch.get_num_threads() if self._on_cpu else 0.0
        elapsed = sum(timer.elapsed[phase] for phase in STEP_PHASES)
        now = self._before.new_tensor([timer.stalled, timer.elapsed["data"], computed, elapsed, timer.measured])
        now *= timer.measured > 0  # after the first step the timer begins anew
        spent, self._before = now - self._before, now
        self._pending = self._ranks.gather(spent)  # all ranks; 40 bytes of each to the main one

    def read(self) -> list[str]:
        """When the numbers have arrived: on the main rank a sentence for each that has begun to hold up the others."""
        if self._pending is None:
            return []
        (rows, under_way), self._pending = self._pending, None
        under_way.wait()
        if not rows:
            return []
        self._sums += torch.stack(rows)
        seconds, steps = self._sums[:, len(CAUSES) :].amax(0).tolist()
        if steps < MIN_STEPS or seconds < MIN_SECONDS:
            return []
        parts = (self._sums[:, : len(CAUSES)] / seconds).tolist()  # rank → cause → part of the time
        self._sums.zero_()
        return [message for rank in range(len(parts)) for message in self._compare(rank, parts)]

    def _compare(self, rank: int, parts: list[list[float]]) -> list[str]:
        """The message about this rank, if it is new: a slow rank is reported again only after it has recovered."""
        others = [other for other in range(len(parts)) if other != rank] or [rank]  # a lone rank equals itself
        same_stage = [other for other in others if self._stages[other] == self._stages[rank]] or [rank]
        usual = [
            median(parts[other][cause] for other in (same_stage if cause == COMPUTED else others))
            for cause in range(len(CAUSES))
        ]
        excess, cause = max((parts[rank][cause] - usual[cause], cause) for cause in range(len(CAUSES)))
        is_new = excess > THRESHOLD and rank not in self._slow
        self._slow = self._slow | {rank} if excess > THRESHOLD else self._slow - {rank}
        return [
            f"rank {rank} on {self._hosts[rank]} holds up the others: it {CAUSES[cause]} for"
            f" {100 * parts[rank][cause]:.0f} % of the time, they for {100 * usual[cause]:.0f} %"
        ] * is_new


# ------------------------------------------------------------------------------------------------------ utilisation


class NoUtilization:
    """The operations of a step were not counted."""

    def metrics(self, inputs: Any, seconds: float) -> dict[str, float]:
        """Metrics for a training line. inputs: of a micro-batch of the last step; seconds: of a step."""
        return {}


class Utilization(NoUtilization):
    """Model FLOPs utilisation: the operations of a step, relative to the most that all devices together can do.

    Chowdhery et al. 2022, arXiv:2204.02311, appendix B: forward and backward count, recomputing does not.
    """

    def __init__(self, flops: float, peak: float, inputs: Any, say: Callable[[str], None]) -> None:
        """flops: of a step; peak: a second; inputs: those that were counted; say: prints a sentence."""
        self._flops, self._peak, self._say = flops, peak, say
        self._counted = first_tensor(inputs).shape[1:]  # of a sample

    @override
    def metrics(self, inputs: Any, seconds: float) -> dict[str, float]:
        """The utilisation, 0 to 1. From the first samples of another shape on nothing: they were not counted."""
        if self._peak and first_tensor(inputs).shape[1:] != self._counted:
            self._peak = 0.0
            self._say("note        no utilisation from here on: the samples are not all of one size")
        return {"utilisation": self._flops / seconds / self._peak} if self._peak else {}
