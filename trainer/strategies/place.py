"""Where a rank is: its device, its groups of ranks, and what they tell each other. Here: one process alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.data.sampler import Slice
from trainer.parallel.ranks import Ranks, Vote, set_timeouts
from trainer.parallel.totals import Totals
from trainer.strategies.machine import Machine

Recomputed = Literal["none", "units", "operators"]


@dataclass
class Place:
    """A device and groups of ranks, and what every rank does there. It remembers no network.

    Its fields are its configuration. The facts below hold inside `with place:`.
    """

    sync_bn: bool = False  # BatchNorm's statistics over the whole micro-batch of all data ranks
    activation_checkpointing: Recomputed = "none"  # what the backward computes again instead of keeping it
    machine: Machine = field(default_factory=Machine)

    device: torch.device = field(init=False, repr=False)  # where this rank computes
    world: Ranks = field(init=False, repr=False)  # all ranks
    data: Ranks = field(init=False, repr=False)  # the ranks that read different data
    patience: timedelta = field(init=False, repr=False)  # how long a collective may take at present

    def __enter__(self) -> Self:
        self.device = self.machine.place()
        self.world = self.data = Ranks()
        self.take_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave; never waits for anyone after an error."""

    # Facts that follow.

    @property
    def slice(self) -> Slice:
        """Which samples this rank reads, and where they go."""
        return Slice(self.data.rank, self.data.size, self.device, self.machine.seed)

    @property
    def data_rank(self) -> int:
        """Which slice of the data this rank reads."""
        return self.data.rank

    @property
    def data_size(self) -> int:
        """Into how many slices the data is cut."""
        return self.data.size

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.world.size

    def groups(self) -> list[ProcessGroup]:
        """The process groups of this place."""
        return []

    def take_time(self) -> None:
        """From now on a rank may be as late as in the first step, an evaluation or a save."""
        self._wait(self.machine.timeout)

    def hurry(self) -> None:
        """From now on a collective takes as long as those of a step do: what is slower than that hangs."""
        self._wait(self.machine.step_timeout)

    def _wait(self, patience: timedelta) -> None:
        self.patience = patience
        # When NCCL's time is over its watchdog aborts the process, and nobody is left to say why. The vote of the same
        # step waits on the CPU and raises an error: with twice the time for NCCL it is heard first.
        set_timeouts(self.groups(), patience * 2 if self.device.type == "cuda" else patience)

    # Collectives: every rank calls them, in the same order.

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: every rank's JSON value, in rank order."""
        return self.world.all_gather_values(value)

    def vote(self, *numbers: float) -> Vote:
        """Collective: start asking all ranks for the largest of each number (a flag: is it raised?); read it later.

        They travel as CPU tensors while the step computes: no GPU waits.
        """
        return self.world.vote(numbers, self.patience)

    def totals(self, sums: Mapping[str, Tensor], alike: Mapping[str, Tensor] | None = None) -> Totals:
        """Collective: start adding up these sums over the data ranks, each sample counted once; read them later.

        `alike`: numbers that every rank has already, to arrive with them.
        """
        return Totals(sums, self.data, self.device, alike)

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective: the same totals on every rank, each sample counted once, as CPU tensors."""
        return self.totals(sums).read()
