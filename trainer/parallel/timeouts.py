"""How long a collective may take."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


def set_timeouts(groups: Iterable[ProcessGroup | None], timeout: timedelta) -> None:
    """Let collectives of these groups fail after this long; those under way keep the time they were given.

    `None` stands for a group that this rank is not part of. Local to each rank: nobody is waited for. gloo and NCCL
    take the new time; others (MPI, UCC) warn and keep their own.

    torch.distributed.set_timeout is torch 2.15's; 2.11 to 2.14 have the same function as a private one.
    """
    for group in groups:
        if group is not None:
            _set_timeout(timeout, group)


def _set_timeout(timeout: timedelta, group: ProcessGroup) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timeout, group)
