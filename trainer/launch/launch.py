"""Which process of a launch this is, of how many, and the store they all reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.launch.address import meeting
from trainer.launch.launchers import place
from trainer.launch.rendezvous import Rendezvous, connected, store_of_round
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = timedelta(minutes=30)  # how long one process waits at the store for another that still imports or downloads


@dataclass(frozen=True)
class Launch:
    """One process of a launch. The defaults are a process that was started alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0  # how often torchrun has restarted the group, or Slurm requeued the job
    run_id: str = ""  # of torchrun, the same for all its restarts; empty: nothing restarts this process
    address: str = ""  # host:port of the store, or file:///path; empty: there is none
    hosted: bool = False  # the launcher serves the store; otherwise rank 0 does
    patience: timedelta = field(default=PATIENCE, compare=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Launch:
        """Read what torchrun, Slurm or MPI left. Refusal where it is incomplete or nonsense. Needs no torch."""
        return cls(*place(env))

    def at(self, init_method: str, patience: timedelta = PATIENCE) -> Launch:
        """The same process, meeting the others at `env://` (as the launcher says), `tcp://…` or `file://…`.

        Refusal where the query names another rank than the environment, or where nothing says where to meet.
        """
        said = meeting(init_method)
        rank, size = (self.rank if said.rank is None else said.rank), said.world_size or self.world_size
        if self.world_size > 1 and (rank, size) != (self.rank, self.world_size):
            raise Refusal(
                f"distributed.init_method={init_method}: the launcher's environment says that this is process "
                f"{self.rank} of {self.world_size}; leave ?rank=…&world_size=… out"
            )
        if size > 1 and not (said.address or self.address):
            raise Refusal(
                f"{size} processes, and nothing says where they meet: set MASTER_ADDR (the host of rank 0) and "
                "MASTER_PORT for all of them, or give distributed.init_method=tcp://host:port or file:///path"
            )
        if not said.address or size == 1:
            return replace(self, patience=patience)
        local = _by_hand(rank, size) if self.world_size == 1 else (self.local_rank, self.local_world_size)
        own = Launch(rank, size, *local, self.attempt, self.run_id, said.address)
        return replace(own, patience=patience)

    @property
    def is_main(self) -> bool:
        """Is this the one process that prints and decides?"""
        return self.rank == 0

    @property
    def restarts(self) -> bool:
        """Does a launcher restart whatever does not exit with 0? A stop that was asked for must exit with 0 there."""
        return bool(self.run_id)

    @property
    def requeued(self) -> bool:
        """Has a scheduler run this very command before? What it left is to be continued, not begun anew."""
        return self.attempt > 0 and not self.restarts

    def store(self, patience: timedelta | None = None) -> Store | None:
        """The key-value store of this round's processes alone; None where there is none. Waits for all, the first time.

        A round is one start of all processes; keys of rounds before it are not seen. Refusal if somebody does not come.
        """
        return store_of_round(self._rendezvous(), patience or self.patience) if self.address else None

    def lasting_store(self) -> Store | None:
        """The store that the launcher keeps over all its rounds, restarts included; None where it keeps none."""
        return connected(self._rendezvous()) if self.hosted else None

    def _rendezvous(self) -> Rendezvous:
        return Rendezvous(
            self.rank, self.world_size, self.attempt, self.run_id, self.address, self.hosted, self.patience
        )


def _by_hand(rank: int, size: int) -> tuple[int, int]:
    """The place on its machine of a process that was started by hand: all are on one, unless LOCAL_… say else."""
    found = place({"LOCAL_RANK": str(rank), **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)})
    return found.local_rank, found.local_world_size
