"""Where a rank is: its device, its groups of ranks, and what they tell each other. Here: one process alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.data.slice import Slice
from trainer.parallel.buckets import Sums, Totals
from trainer.parallel.ranks import Ranks, set_timeouts
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
    data_group: Ranks = field(init=False, repr=False)  # the ranks that read different data
    patience: timedelta = field(init=False, repr=False)  # how long a collective may take at present

    def __enter__(self) -> Self:
        self.device = self.machine.claim_device()
        self.world = self.data_group = Ranks()
        self.use_long_timeout()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave; never waits for anyone after an error."""

    def groups(self) -> list[ProcessGroup]:
        """The process groups of this place."""
        return []

    @property
    def slice(self) -> Slice:
        """Which samples this rank reads, and where they go."""
        return Slice(self.data_group.rank, self.data_group.size, self.device, self.machine.seed)

    # How late a rank may be.

    def use_long_timeout(self) -> None:
        """From now on a rank may be as late as in the first step, an evaluation or a save."""
        self._wait(self.machine.timeout)

    def use_step_timeout(self) -> None:
        """From now on a collective takes as long as those of a step do: what is slower than that hangs."""
        if self.patience != self.machine.step_timeout:
            self._wait(self.machine.step_timeout)

    def _wait(self, patience: timedelta) -> None:
        self.patience = patience
        # When NCCL's time is over its watchdog aborts the process, and nobody is left to say why. The vote of the same
        # step waits on the CPU and raises an error: with twice the time for NCCL it is heard first.
        set_timeouts(self.groups(), patience if self.device.type == "cpu" else patience * 2)

    # Collectives: every rank calls them, in the same order.

    def totals(self, sums: Sums, alike: Mapping[str, Tensor] | None = None) -> Totals:
        """Collective: start adding up these sums over the data ranks, each sample counted once; read them later.

        `alike`: numbers that every rank has already, to arrive with them.
        """
        return Totals(sums, self.data_group, self.device, alike)
