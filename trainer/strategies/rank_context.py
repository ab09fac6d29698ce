"""`RankContext`: the device of a rank, its groups of ranks, its time limits; and the votes between ranks.

`Strategy` derives from it. This class is for one process; `multi_process.py` has the ones for several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from time import perf_counter
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from trainer.data.sampler import RankSampler
from trainer.launch.main_thread_watchdog import RankProgress
from trainer.learning.intervals import Cadences
from trainer.parallel.activation_checkpointing import ActivationCheckpointing
from trainer.parallel.activation_offload import HostCopies, make_host_copies
from trainer.parallel.buckets import PendingSums, Sums
from trainer.parallel.process_group import set_timeouts
from trainer.parallel.ranks import PendingMaximum, Ranks
from trainer.parallel.rng.kernels import install_kernels, uninstall_kernels
from trainer.strategies.machine import Machine
from trainer.strategies.step_timing import NoStallClock, StepTimer

# torch ends a collective so much later than the watchdog does, which can say who hangs
WATCHDOG_MARGIN = timedelta(seconds=30)


@dataclass
class RankContext:
    """The device and the groups of this rank. It holds no network.

    Its fields are its configuration. Those with `init=False` are set by `with` (or later).
    """

    narrowing: ClassVar[tuple[str, ...]] = ()  # fields that make numbers narrower than the precision; null: they do not
    own_curve: ClassVar[bool] = False  # is its learning curve another one than that of one process, on purpose?
    divides_parameters: ClassVar[bool] = False  # does the optimizer of a rank step some of them, or parts?
    sync_bn: bool = False  # BatchNorm's statistics over the whole micro-batch of all data ranks
    activation_checkpointing: ActivationCheckpointing = "none"  # what the backward computes again instead of keeping it
    activation_offload: bool = False  # what the backward needs waits in the host's memory
    machine: Machine = field(default_factory=Machine)

    cadences: Cadences = field(init=False, repr=False, compare=False, default=Cadences())  # how often the run does what
    device: torch.device = field(init=False, repr=False)  # where this rank computes
    world: Ranks = field(init=False, repr=False)  # all ranks
    data_group: Ranks = field(init=False, repr=False)  # the ranks that read different data
    # what copies between the device and the host; None: they share one memory. A plan counts instead
    host_copies: Callable[[torch.device], HostCopies | None] = field(
        init=False, repr=False, compare=False, default_factory=lambda: make_host_copies
    )
    # how long a rank may take for a phase at present; joining has a limit of its own
    time_limit: timedelta = field(init=False, repr=False, default=timedelta.max)
    # the time of each phase of its steps
    watch: StepTimer = field(init=False, repr=False, compare=False, default_factory=partial(StepTimer, NoStallClock()))

    def __enter__(self) -> Self:
        self.device = self.machine.claim_device()
        self.world = self.data_group = Ranks()
        self.use_long_timeout()
        install_kernels(self.device, self.dropout, self.machine.compile is not None)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave the groups; after an error without waiting for other ranks."""
        uninstall_kernels(self.dropout)

    def groups(self) -> list[ProcessGroup]:
        """All process groups, so that timeouts can be set on them."""
        return []

    @property
    def loss_group(self) -> Ranks:
        """The ranks whose losses make up the step's: they read different samples, or other parts of the same."""
        return self.data_group

    @property
    def counting_groups(self) -> list[Ranks]:
        """The groups over which a step's counters are added up, one after the other."""
        return [self.loss_group]

    @property
    def slice(self) -> RankSampler:
        """Which samples this rank reads, and the device that they are needed on."""
        return RankSampler(self.data_group.rank, self.data_group.size, self.device, self.machine.seed)

    @property
    def dropout(self) -> Literal["sample", "native"]:
        """Whose random numbers a forward has: each sample's own, or torch's."""
        return self.machine.dropout or "sample"

    @property
    def uses_units(self) -> bool:
        """Is something done to each unit of the network, whatever spreads it over ranks?"""
        return self.activation_checkpointing != "none" or self.activation_offload

    # time limits

    def use_long_timeout(self) -> None:
        """From now on a collective may take as long as in the first step, an evaluation or a save."""
        self._set_time_limit(self.machine.timeout)

    def use_step_timeout(self) -> None:
        """From now on a collective takes no longer than in a step: what is slower hangs."""
        if self.time_limit != self.machine.step_timeout:
            self._set_time_limit(self.machine.step_timeout)

    def pulse(self, step: int) -> RankProgress:
        """How far this rank is in a run, in this step, and how long it may take; any thread may ask."""
        limits = self.time_limit, self.machine.step_timeout
        return RankProgress(step, self.watch.phases_done, *(limit.total_seconds() for limit in limits))

    def _set_time_limit(self, time_limit: timedelta) -> None:
        self.time_limit = time_limit
        # After its timeout NCCL aborts the process, which can print no message any more. The vote of the same step
        # waits on the CPU and raises an error: NCCL gets twice the time, so the vote's timeout comes first.
        set_timeouts(self.groups(), (time_limit if self.device.type == "cpu" else time_limit * 2) + WATCHDOG_MARGIN)

    # collectives: every rank calls them, in the same order

    def totals(self, sums: Sums, alike: Mapping[str, Tensor] | None = None) -> PendingSums:
        """Collective: start adding up these sums over the data ranks, each sample counted once; read them later.

        `alike`: numbers that every rank has already, to arrive with them.
        """
        return PendingSums(sums, self.data_group, self.device, alike)


VOTE_INTERVAL = 0.05  # between two votes, where steps are shorter: a request to stop is heard as soon as that
MAX_VOTE_STEPS = 32  # steps between two votes, should they become slow all at once


class StopVotes:
    """The votes of one loop's steps: asked after a backward has begun, read at the end of the step.

    This class is one process: what it has raised is the answer.
    """

    _raised: Sequence[bool]

    def ask(self, *flags: bool) -> None:
        """Collective where a vote is due, called in each step: start asking which flags any rank has raised."""
        self._raised = flags

    def read(self) -> Sequence[bool]:
        """The flags that some rank had raised, the same on every rank; none of them where there was no vote."""
        return self._raised

    def now(self, *flags: bool) -> Sequence[bool]:
        """Collective: the flags that some rank has raised, beside those of the steps; waits for the answer."""
        return flags


class RankStopVotes(StopVotes):
    """The votes of several ranks.

    On CPUs it is read in the same step, and where a vote would take as long as a step there is one at every so many of
    them. Beside a GPU it is asked in one step and read in the next: it travels while the host goes on, and no step
    waits for it unless it takes longer than a step. Flags stay raised until they are heard. When the next vote comes
    follows from the last one, so that all ranks agree.
    """

    def __init__(self, place: RankContext) -> None:
        self._place = place
        # Beside a GPU a vote costs no time. One of two steps: a vote is what hears of a rank that hangs before the host
        # waits for the GPU, where nothing but NCCL's watchdog would end it.
        self._delay, self._most = (0, MAX_VOTE_STEPS) if place.device.type == "cpu" else (1, 2)
        # steps from the last answer to the next; how many of them are still to come
        self._apart = self._left = 1 + self._delay
        self._since = -inf  # nothing is known about steps until the second vote

    @override
    def ask(self, *flags: bool) -> None:
        self._flags = (False,) * len(flags)
        self._left -= 1
        if self._left == self._delay:
            now = perf_counter()
            self._vote = self._begin((now - self._since) / self._apart, *flags)  # how long a step took, and the flags
            self._since = now

    @override
    def read(self) -> Sequence[bool]:
        if self._left:
            return self._flags
        slowest, *flags = self._vote.read()
        self._apart = self._left = max(1 + self._delay, min(self._most, int(VOTE_INTERVAL / slowest)))
        return [bool(flag) for flag in flags]

    @override
    def now(self, *flags: bool) -> Sequence[bool]:
        return [bool(flag) for flag in self._begin(*flags).read()]

    def _begin(self, *numbers: float) -> PendingMaximum:
        # all ranks; 8 bytes a number, as a CPU tensor while the step computes: no GPU waits
        return self._place.world.vote(numbers, self._place.time_limit + WATCHDOG_MARGIN)
