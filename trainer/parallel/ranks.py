"""A group of processes and what they can tell each other; a process alone is the neutral element."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ALWAYS = timedelta()  # as torch says it: no time of its own, the group's counts


class Done:
    """A collective that has nothing to wait for."""

    def wait(self, timeout: timedelta = ALWAYS) -> None:
        """Return at once."""


class Waitable(Protocol):
    """A collective under way."""

    def wait(self, timeout: timedelta = ALWAYS) -> Any:
        """Block until the result stands in the tensor that was given; RuntimeError after that long."""


class Vote:
    """Numbers of one process, flags among them: they are the answer."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = numbers

    def read(self) -> Sequence[float]:
        """The largest of each over the ranks: a flag is true if any had raised it."""
        return self._numbers


class VoteUnderWay(Vote):
    """Numbers that travel."""

    def __init__(self, numbers: Sequence[float], ranks: Ranks, patience: timedelta) -> None:
        self._largest = torch.tensor(numbers, dtype=torch.float64)
        self._work = ranks.all_reduce_max_(self._largest)  # these ranks; 8 bytes a number
        self._patience = patience

    def read(self) -> Sequence[float]:
        """The largest of each over the ranks: a flag is true if any had raised it."""
        self._work.wait(self._patience)
        return self._largest.tolist()


class Ranks:
    """One process alone: every collective is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Is this the one rank that decides and writes for all?"""
        return self.rank == 0

    def all_reduce_sum_(self, tensor: Tensor) -> Waitable:
        """Collective: start adding up this tensor over the ranks, in place."""
        return Done()

    def all_reduce_max_(self, tensor: Tensor) -> Waitable:
        """Collective: start taking the largest of this tensor over the ranks, in place."""
        return Done()

    def vote(self, numbers: Sequence[float], patience: timedelta) -> Vote:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        return Vote(numbers)

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks, in rank order; shapes must agree."""
        return [tensor]

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the JSON values of all ranks, in rank order."""
        return [value]

    def barrier(self) -> None:
        """Collective: return when every rank has arrived."""


class Group(Ranks):
    """The processes of one `torch.distributed` process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def all_reduce_sum_(self, tensor: Tensor) -> Waitable:
        """Collective: start adding up this tensor over the ranks, in place."""
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def all_reduce_max_(self, tensor: Tensor) -> Waitable:
        """Collective: start taking the largest of this tensor over the ranks, in place."""
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def vote(self, numbers: Sequence[float], patience: timedelta) -> Vote:
        """Collective: start asking for the largest of each number; a rank may be so late with its answer."""
        return VoteUnderWay(numbers, self, patience)

    def broadcast_(self, tensor: Tensor) -> None:
        """Collective: every rank's tensor becomes the first rank's."""
        whole = tensor.contiguous()
        plain = whole.reshape(-1).view(torch.uint8)  # as bytes: no backend knows every type
        dist.broadcast(plain, src=self._first, group=self.group)
        if whole is not tensor:
            tensor.copy_(whole)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks, in rank order; shapes must agree."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]  # in order as well: NCCL copies memory, not values
        dist.all_gather(parts, own, group=self.group)
        return parts

    def all_gather_values(self, value: Any) -> list[Any]:
        """Collective: the JSON values of all ranks, in rank order; CPU tensors travel, no pickle."""
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        longest = torch.tensor([len(text)])
        self.all_reduce_max_(longest).wait()
        padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
        padded[: len(text)] = text
        return [json.loads(bytes(part.tolist())) for part in self.all_gather(padded)]

    def barrier(self) -> None:
        """Collective: return when every rank has arrived. A CPU tensor travels, so a GPU is not waited for."""
        self.all_reduce_sum_(torch.zeros(1)).wait()
