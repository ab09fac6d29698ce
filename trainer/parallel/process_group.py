"""Joining a process group and leaving it, its backend and its timeouts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.fake_group import FakeGroup, join_fake_group
from trainer.parallel.ranks import Group, Ranks


def as_group(group: ProcessGroup) -> Group:
    """The collectives of a process group, by what carries its tensors."""
    return FakeGroup(group) if dist.get_backend(group) == dist.Backend.FAKE else Group(group)


def backend_of(kind: str, wanted: str | None) -> str:
    """What sends tensors of this kind of device: what is wanted, or torch's choice (NCCL for cuda, XCCL for xpu)."""
    return wanted or dist.Backend.default_device_backend_map.get(kind, "gloo")


def refuse_backend(kind: str, wanted: str | None) -> None:
    """Refuse a group of processes where torch, or the backend that is wanted, cannot send tensors of this kind."""
    default, able = backend_of(kind, None), dist.Backend.backend_capability  # backend → the kinds that it sends
    if kind not in able.get(default, []):
        raise Refusal(
            f"torch has nothing that sends tensors of {kind} from process to process; use strategy=single in one"
            " process, or device=cpu in several"
        )
    if wanted is not None and kind not in able.get(wanted, []):
        others = " and ".join(able.get(wanted, ["nothing"]))
        raise Refusal(
            f"distributed.backend={wanted} sends tensors of {others}, and this run computes on {kind}; use {default}"
            " (or null)"
        )


def join_group(launch: Launch, device: torch.device, backend: str | None, timeout: timedelta) -> Group:
    """Collective: every process of the launch joins one group. CPU tensors always travel by gloo.

    The addresses travel through the store of this round alone: with torchrun's stock settings a restarted attempt would
    otherwise read the dead attempt's and could not connect (pytorch/pytorch#135712).
    """
    if backend == dist.Backend.FAKE:
        return join_fake_group(launch)
    store = launch.store()
    if store is None:  # a process that was started alone: a group of one
        store = dist.HashStore()
    chosen = backend_of(device.type, backend)
    # of a thousand ranks each talks to a dozen; but who waits to be connected has the group's limit, not the call's
    if launch.world_size > 8:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        backend="gloo" if chosen == "gloo" else f"cpu:gloo,{device.type}:{chosen}",
        store=dist.PrefixStore("world", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=None if chosen == "gloo" else device,  # binds NCCL from the start; gloo so bound makes no sub-groups
    )
    assert dist.group.WORLD is not None
    return Group(dist.group.WORLD)


_left: list[Ranks] = []  # the group that was left last


def leave_group(world: Ranks, clean: bool) -> None:
    """Leave the process group; after an error not where other ranks may be gone, of a group of one always.

    Without the barrier one process in five aborts while gloo's threads are torn down (measured on torch 2.11 to 2.15).
    The group's object outlives it: whoever drops the last reference (torch 2.11: DDP's reducer) waits, with the
    interpreter's lock held, for a gloo thread that may be waiting for that lock to drop the barrier's tensor.
    """
    if clean or world.size == 1:
        world.barrier()  # all ranks; nobody tears down what another one still reads from
        _left[:] = [world]
        dist.destroy_process_group()


def set_timeouts(groups: Iterable[ProcessGroup], timeout: timedelta) -> None:
    """Let collectives of these groups fail after this long; those under way keep the time they were given.

    Local to each rank: nobody is waited for. gloo and NCCL take the new time; others (MPI, UCC) warn and keep theirs.
    """
    for group in groups:
        # public in torch 2.15; 2.11 to 2.14 have the same function as a private one
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timeout, group)
        else:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            _set_pg_timeout(timeout, group)
