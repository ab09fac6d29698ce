"""Joining the process group of a launch, how long its collectives may take, and leaving it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.launch.launch import Launch
from trainer.parallel.ranks import Group, Ranks


def join_group(launch: Launch, device: torch.device, backend: str | None, timeout: timedelta) -> Group:
    """Collective: every process of the launch joins one group. CPU tensors always travel by gloo.

    The addresses travel through the store of this round alone: with torchrun's stock settings a restarted attempt would
    otherwise read the dead attempt's and could not connect (pytorch/pytorch#135712).
    """
    store = launch.store()
    if store is None:  # a process that was started alone: a group of one
        store = dist.HashStore()
    nccl = device.type == "cuda" and backend != "gloo"
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=dist.PrefixStore("world", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if nccl else None,  # binds NCCL to it from the start; gloo so bound could make no sub-groups
    )
    assert dist.group.WORLD is not None
    return Group(dist.group.WORLD)


_left: list[Ranks] = []  # the group that was left last


def leave_group(world: Ranks, clean: bool) -> None:
    """Leave the process group; after an error without waiting for ranks that may be gone.

    Without the barrier one process in five aborts while gloo's threads are torn down (measured on torch 2.11 to 2.15).
    The group's object outlives it: whoever drops the last reference (torch 2.11: DDP's reducer) waits, with the
    interpreter's lock held, for a gloo thread that may be waiting for that lock to drop the barrier's tensor.
    """
    if clean:
        world.barrier()
        _left[:] = [world]
        dist.destroy_process_group()


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
