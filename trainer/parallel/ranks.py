"""A group of processes: joining it, what they tell each other, leaving it. One alone is a group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

GROUP_TIMEOUT = timedelta()  # as torch says it: no time of its own, the group's counts


class CompletedWork:
    """A collective that has nothing to wait for."""

    def wait(self, timeout: timedelta = GROUP_TIMEOUT) -> None:
        """Return at once."""


COMPLETED = CompletedWork()


Waitable = (
    CompletedWork | dist.Work
)  # a collective under way: wait() until the result stands in the tensor that was given


class Vote:
    """Numbers that ranks were asked for, flags among them; those of a process alone are the answer."""

    def __init__(
        self, numbers: Sequence[float] | Tensor, under_way: Waitable = COMPLETED, patience: timedelta = GROUP_TIMEOUT
    ) -> None:
        self._numbers, self._under_way, self._patience = numbers, under_way, patience

    def read(self) -> list[float]:
        """The largest of each over the ranks: a flag is true if any had raised it."""
        self._under_way.wait(self._patience)
        return [float(number) for number in self._numbers]


class Ranks:
    """A group of ranks and its collectives. This class is one process: a collective returns what it is given."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Is this the one rank that decides and writes for all?"""
        return self.rank == 0

    def all_reduce_sum_(self, tensor: Tensor) -> Waitable:
        """Collective: start adding up this tensor over the ranks, in place."""
        return COMPLETED

    def all_reduce_max_(self, tensor: Tensor) -> Waitable:
        """Collective: start taking the largest of this tensor over the ranks, in place."""
        return COMPLETED

    def sum_in_order(self, number: Tensor) -> Tensor:
        """Collective: the sum of one number of each rank, added in rank order everywhere.

        So it is the same bits wherever the numbers are; an all-reduce adds in an order that each group has for itself.
        """
        return number

    def vote(self, numbers: Sequence[float], patience: timedelta) -> Vote:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        return Vote(numbers)

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks, in rank order; shapes must agree."""
        return [tensor]

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order."""
        return [value]

    def gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order, on the main rank; none on the others."""
        return [value]

    def barrier(self) -> None:
        """Collective: return when every rank has arrived."""

    def duplicate(self, timeout: timedelta) -> Ranks:
        """Collective: the same ranks for another thread, whose collectives of CPU tensors mix with no others."""
        return self


class Group(Ranks):
    """The processes of one `torch.distributed` process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def all_reduce_sum_(self, tensor: Tensor) -> Waitable:
        """Collective: start adding up this tensor over the ranks, in place."""
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def all_reduce_max_(self, tensor: Tensor) -> Waitable:
        """Collective: start taking the largest of this tensor over the ranks, in place."""
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def sum_in_order(self, number: Tensor) -> Tensor:
        """Collective: the sum of one number of each rank, added in rank order everywhere."""
        each = number.new_empty(self.size)  # (ranks,)
        dist.all_gather_into_tensor(each, number.reshape(1), group=self.group)  # these ranks; one number of each
        return each.sum()

    def vote(self, numbers: Sequence[float], patience: timedelta) -> Vote:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        largest = torch.tensor(numbers, dtype=torch.float64)
        return Vote(largest, self.all_reduce_max_(largest), patience)  # these ranks; 8 bytes a number

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""
        # what has gaps in memory travels as a copy
        whole = tensor.contiguous()
        plain = whole.reshape(-1).view(torch.uint8)  # as bytes: no backend knows every type
        dist.broadcast(plain, src=self._first, group=self.group)
        if whole is not tensor:
            tensor.copy_(whole)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks, in rank order; shapes must agree."""
        own = tensor.contiguous()
        tensors = [torch.empty_like(own) for _ in range(self.size)]  # in order as well: NCCL copies memory, not values
        dist.all_gather(tensors, own, group=self.group)
        return tensors

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order; they travel as CPU tensors."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)  # these ranks; every value to all
        return values

    def gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks on the main rank; they travel as CPU tensors."""
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=self._first, group=self.group)  # these ranks; every value to the first
        return values or []

    def barrier(self) -> None:
        """Collective: return when every rank has arrived. A CPU tensor travels, so a GPU is not waited for."""
        self.all_reduce_sum_(torch.zeros(1)).wait()

    def duplicate(self, timeout: timedelta) -> Ranks:
        """Collective: the same ranks for another thread, whose collectives of CPU tensors mix with no others."""
        own = dist.get_process_group_ranks(self.group)
        # these ranks alone: those beside them may be in several such groups
        group = dist.new_group(own, timeout, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)  # this rank is in it
        return Group(group)


def backend_of(kind: str, wanted: str | None) -> str:
    """What sends tensors of this kind of device: what is wanted, or torch's choice (NCCL for cuda, XCCL for xpu)."""
    return wanted or dist.Backend.default_device_backend_map.get(kind, "gloo")


def refuse_backend(kind: str, wanted: str | None) -> None:
    """Refuse a group of processes where torch, or the backend that is wanted, cannot send tensors of this kind."""
    own, able = backend_of(kind, None), dist.Backend.backend_capability  # backend → the kinds that it sends
    if kind not in able.get(own, []):
        raise Refusal(
            f"torch has nothing that sends tensors of {kind} from process to process; use strategy=single in one"
            " process, or device=cpu in several"
        )
    if wanted is not None and kind not in able.get(wanted, []):
        others = " and ".join(able.get(wanted, ["nothing"]))
        raise Refusal(
            f"distributed.backend={wanted} sends tensors of {others}, and this run computes on {kind}; use {own}"
            " (or null)"
        )


def join_group(launch: Launch, device: torch.device, backend: str | None, timeout: timedelta) -> Group:
    """Collective: every process of the launch joins one group. CPU tensors always travel by gloo.

    The addresses travel through the store of this round alone: with torchrun's stock settings a restarted attempt would
    otherwise read the dead attempt's and could not connect (pytorch/pytorch#135712).
    """
    store = launch.store()
    if store is None:  # a process that was started alone: a group of one
        store = dist.HashStore()
    own = backend_of(device.type, backend)
    dist.init_process_group(
        backend="gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}",
        store=dist.PrefixStore("world", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=None if own == "gloo" else device,  # binds NCCL from the start; gloo so bound makes no sub-groups
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


def all_or_none(ranks: Ranks, action: Callable[[], Any], failure: type[Exception]) -> list[Any]:
    """What the action returned on each rank, in rank order; where it failed on one, `failure` on all. Collective."""
    cause, mine = None, {}
    # whatever happens here, this rank comes to the collective: the others wait for it there
    try:
        mine["value"] = action()
    except Exception as error:
        cause = error
        mine["error"] = str(error) if isinstance(error, (failure, OSError)) else f"{type(error).__name__}: {error}"
    results = ranks.all_gather_values(mine)  # all ranks; each hears the values and errors of all
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise failure(errors[0]) from cause
    return [result["value"] for result in results]
