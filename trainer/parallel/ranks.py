"""A group of processes and what they tell each other. One alone is a group of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")
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

    def all_to_all(
        self, rows: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Collective: so many rows go to each rank, in rank order, and so many come; None: as many to each."""
        return rows

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order. What one rank decides, `broadcast_value` sends."""
        return [value]

    def gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order, on the main rank; none on the others."""
        return [value]

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Waitable]:
        """Collective: start sending the main rank a tensor of each rank, which it has after wait(); others get none."""
        return [tensor], COMPLETED

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

    def all_to_all(
        self, rows: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Collective: so many rows go to each rank, in rank order, and so many come; None: as many to each."""
        arrived = rows.new_empty(len(rows) if receives is None else sum(receives), *rows.shape[1:])
        came, went = (None if sizes is None else [*sizes] for sizes in (receives, sends))
        dist.all_to_all_single(arrived, rows.contiguous(), came, went, group=self.group)  # these ranks
        return arrived

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks, in rank order; they travel as CPU tensors."""
        # to the main rank and from there to all: of torch's own way each rank sends each other one as many bytes as the
        # longest value has
        return list(self.broadcast_value(self.gather_values(value)))

    def gather_values(self, value: Any) -> list[Any]:
        """Collective: the plain values of all ranks on the main rank; they travel as CPU tensors."""
        # A tree of as many rounds as the number of ranks has bits. In round k a rank with this bit sends all it has to
        # the one 2^k before it: each rank sends once, and each value travels no further than it must.
        values, step = {self.rank: value}, 1
        while step < self.size:
            if self.rank & step:
                dist.send_object_list([values], group=self.group, group_dst=self.rank - step)
                return []
            if self.rank + step < self.size:
                received: list[Any] = [None]
                dist.recv_object_list(received, group=self.group, group_src=self.rank + step)
                values |= received[0]
            step *= 2
        return [values[rank] for rank in range(self.size)]

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Waitable]:
        """Collective: start sending the main rank a tensor of each rank, which it has after wait(); others get none."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_main else []
        # these ranks; each sends its tensor to the first
        work = dist.gather(tensor, tensors or None, dst=self._first, group=self.group, async_op=True)
        return tensors, work or COMPLETED

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


def gather_exceptions(ranks: Ranks, value: Any) -> list[Any]:
    """Collective: the values of all ranks where any has something to say, else none: as a rule a byte of each."""
    # all ranks; whether a value is not empty
    return ranks.all_gather_values(value) if ranks.max_values([bool(value)])[0] else []


def all_or_none(ranks: Ranks, action: Callable[[], T], failure: type[Exception]) -> T:
    """What the action returned on this rank; where it failed on one rank, `failure` on all. Collective."""
    results: list[T] = []
    cause, problem = None, ""
    # whatever happens here, this rank comes to the collective: the others wait for it there
    try:
        results.append(action())
    except Exception as error:
        cause, name = error, type(error).__name__
        problem = (isinstance(error, (failure, OSError)) and str(error)) or f"{name}: {error}"
    for message in filter(None, gather_exceptions(ranks, problem)):  # all ranks; the first that failed counts
        raise failure(message) from cause
    return results[0]
