"""What the launcher left in the environment: which process this is, of how many, and the store they all reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = timedelta(minutes=10)  # how long one process waits at the store for another that still imports or downloads


@dataclass(frozen=True)
class Launch:
    """One process of a launch. The defaults are a process that was started alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0  # how often torchrun has restarted the group
    run_id: str = ""  # of torchrun, the same for all its restarts; empty: nothing restarts this process
    address: str = ""  # host:port of the store; empty: there is none
    hosted: bool = False  # the launcher serves the store; otherwise rank 0 does

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Launch:
        """Read what torchrun exports. Refusal where it is incomplete."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(key)]
        if missing:
            raise Refusal(f"the environment is half a launcher's: {', '.join(missing)} missing; start with torchrun")
        world_size = int(env["WORLD_SIZE"])
        return cls(
            rank=int(env["RANK"]),
            world_size=world_size,
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            run_id=env.get("TORCHELASTIC_RUN_ID", ""),
            address=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
            hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def is_main(self) -> bool:
        """Is this the one process that prints and decides?"""
        return self.rank == 0

    @property
    def restarts(self) -> bool:
        """Does a launcher restart whatever does not exit with 0? A stop that was asked for must exit with 0 there."""
        return bool(self.run_id)

    def store(self) -> Store | None:
        """The key-value store that all processes reach, before any process group; None where no launcher made one."""
        return _connected(self) if self.address else None

    def once(self, key: str) -> str:
        """A key of this attempt alone: what a dead attempt left under it must not be read by the next one."""
        return f"trainer/{self.run_id}/attempt-{self.attempt}/{key}"


@lru_cache(maxsize=1)
def _connected(launch: Launch) -> Store:
    from torch.distributed import TCPStore

    host, port = launch.address.rsplit(":", 1)
    serves = launch.is_main and not launch.hosted
    try:
        return TCPStore(host, int(port), launch.world_size, serves, PATIENCE, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:  # DistNetworkError: port taken, host unknown, nobody answers
        raise Refusal(f"cannot reach the store at {launch.address}: {str(error).splitlines()[0]}") from error
