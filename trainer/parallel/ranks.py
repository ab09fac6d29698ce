"""A group of processes and what they tell each other. One alone is a group of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BucketHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
GROUP_TIMEOUT = timedelta()  # as torch says it: no time of its own, the group's counts


class CompletedWork:
    """A collective that has nothing to wait for."""

    def wait(self, timeout: timedelta = GROUP_TIMEOUT) -> None:
        """Return at once."""


COMPLETED = CompletedWork()


# a collective under way: after wait() the result stands in the tensor that was given
Waitable = CompletedWork | dist.Work


class PendingMaximum:
    """The largest of each number over the ranks, which `read` waits for; one process alone has it at once."""

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

    def max_values(self, numbers: Sequence[int]) -> list[int]:
        """Collective: the largest of each small whole number (0 to 255) over the ranks; the host knows it at once."""
        return list(numbers)

    def sum_in_order(self, number: Tensor) -> Tensor:
        """Collective: the sum of one number of each rank, added in rank order everywhere.

        So it is the same bits wherever the numbers are; an all-reduce adds in an order that each group has for itself.
        """
        return number

    def vote(self, numbers: Sequence[float], patience: timedelta) -> PendingMaximum:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        return PendingMaximum(numbers)

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""

    def broadcast_value(self, value: Any, source: int = 0) -> Any:
        """Collective: the plain value of one of the ranks, on all of them."""
        return value

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

    def max_values(self, numbers: Sequence[int]) -> list[int]:
        """Collective: the largest of each small whole number over the ranks; they travel as a CPU tensor."""
        if not numbers:
            return []
        largest = torch.tensor(numbers, dtype=torch.uint8)
        self.all_reduce_max_(largest).wait()  # these ranks; a byte a number
        return largest.tolist()

    def sum_in_order(self, number: Tensor) -> Tensor:
        """Collective: the sum of one number of each rank, added in rank order everywhere."""
        each = number.new_empty(self.size)  # (ranks,)
        dist.all_gather_into_tensor(each, number.reshape(1), group=self.group)  # these ranks; one number of each
        return each.sum()

    def vote(self, numbers: Sequence[float], patience: timedelta) -> PendingMaximum:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        largest = torch.tensor(numbers, dtype=torch.float64)
        return PendingMaximum(largest, self.all_reduce_max_(largest), patience)  # these ranks; 8 bytes a number

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""
        # what has gaps in memory travels as a copy
        whole = tensor.contiguous()
        plain = whole.reshape(-1).view(torch.uint8)  # as bytes: no backend knows every type
        dist.broadcast(plain, src=self._first, group=self.group)
        if whole is not tensor:
            tensor.copy_(whole)

    def bucket_hook(self, hook: BucketHook | None) -> BucketHook | None:
        """What DDP is to call to average a bucket of gradients over these ranks: this hook, or None for DDP's own."""
        return hook

    def broadcast_value(self, value: Any, source: int = 0) -> Any:
        """Collective: the plain value of one of the ranks, on all of them; it travels as a CPU tensor."""
        values = [value]
        dist.broadcast_object_list(values, group_src=source, group=self.group)  # these ranks; the value to all
        return values[0]

    def send_value(self, value: Any, peer: int) -> list[tuple[Waitable, Tensor]]:
        """Start sending what JSON can say to one of the ranks, as CPU tensors; each must live until it is sent."""
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        # to that rank: how long the text is, and the text
        return [self.send(tensor, peer) for tensor in (torch.tensor([len(text)]), text)]

    def receive_value(self, peer: int) -> Any:
        """What one of the ranks sends by `send_value`; waits for it."""
        length = int(self.receive_(torch.zeros(1, dtype=torch.int64), peer))
        return json.loads(bytes(self.receive_(torch.empty(length, dtype=torch.uint8), peer).tolist()))

    def send(self, tensor: Tensor, peer: int) -> tuple[Waitable, Tensor]:
        """Start sending a tensor to one of the ranks; it must live until it is sent."""
        return dist.isend(tensor, group=self.group, group_dst=peer) or COMPLETED, tensor

    def receive_(self, space: Tensor, peer: int) -> Tensor:
        """Fill a tensor with what one of the ranks sends; waits for it."""
        dist.recv(space, group=self.group, group_src=peer)
        return space

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks, in rank order; shapes must agree."""
        local = tensor.contiguous()
        tensors = [
            torch.empty_like(local) for _ in range(self.size)
        ]  # in order as well: NCCL copies memory, not values
        dist.all_gather(tensors, local, group=self.group)  # these ranks; every tensor to all
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
        members = dist.get_process_group_ranks(self.group)
        # these ranks alone: those beside them may be in several such groups
        group = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)  # this rank is in it
        return Group(group)


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
