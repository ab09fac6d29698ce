"""A group of torch's `fake` backend, which sends nothing: one process stands for all ranks, in a trial without values.

Every other rank is taken to hold what this one does. Where ranks differ, as the stages of a pipeline do, they are tried
one after the other, and what one of them has sent is kept for the others.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.launch.rendezvous import Launch
from trainer.parallel.ranks import COMPLETED, BucketHook, Group, PendingMaximum, Ranks, Waitable

Letter = tuple[tuple[int, ...], str, int, int, int]  # the ranks of a group, kind, sender, receiver, the how many-th


class NotYetSent(BaseException):
    """This rank needs what another one has not sent yet. No Exception, which a network's own code might catch."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank  # of all, who is to be tried before


class FakeGroup(Group):
    """The collectives of ranks that one process stands for: they have this rank's numbers."""

    mail: ClassVar[dict[Letter, Any]] = {}  # what ranks that were tried have sent

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._members = tuple(dist.get_process_group_ranks(group))
        self._counts: Counter[tuple[str, int, int]] = Counter()  # of what went from one rank to another

    def max_values(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of this rank."""
        if numbers:
            largest = torch.empty(len(numbers), dtype=torch.uint8)
            dist.all_reduce(largest, group=self.group)  # these ranks; a byte a number
        return list(numbers)

    def vote(self, numbers: Sequence[float], patience: timedelta) -> PendingMaximum:
        """The numbers of this rank."""
        return PendingMaximum(numbers)

    def all_gather_values(self, value: Any) -> list[Any]:
        """The value of this rank, as often as there are ranks."""
        return [value] * self.size

    def gather_values(self, value: Any) -> list[Any]:
        """The same on the main rank."""
        return [value] * self.size if self.is_main else []

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Waitable]:
        """The tensor of this rank, as often as there are ranks."""
        return [tensor] * self.size, COMPLETED

    def bucket_hook(self, hook: BucketHook | None) -> BucketHook | None:
        """One that gives the bucket back, because a future of this group has nothing in it."""

        def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            gradients: torch.futures.Future[Tensor] = torch.futures.Future()
            # a hook halves the bytes; these ranks; a bucket of gradients
            dist.all_reduce(bucket.buffer() if hook is None else bucket.buffer().half(), group=self.group)
            gradients.set_result(bucket.buffer())
            return gradients

        return reduce

    def broadcast_value(self, value: Any, source: int = 0) -> Any:
        """The value of the rank that has it: this one, or one that was tried before."""
        key = self._next("broadcast", source, -1)
        return self._keep(key, value) if source == self.rank else self._kept(key, source)

    def send_value(self, value: Any, peer: int) -> list[tuple[Waitable, Tensor]]:
        """Keep it for the trial of that rank."""
        self._keep(self._next("send", self.rank, peer), value)
        return []

    def receive_value(self, peer: int) -> Any:
        """What the trial of that rank has kept."""
        return self._kept(self._next("send", peer, self.rank), peer)

    def send(self, tensor: Tensor, peer: int) -> tuple[Waitable, Tensor]:
        """Nothing: who receives it makes room, and there are no values."""
        return COMPLETED, tensor

    def receive_(self, space: Tensor, peer: int) -> Tensor:
        """The room that was made."""
        return space

    def barrier(self) -> None:
        """Return: nobody else is there."""

    def duplicate(self, timeout: timedelta) -> Ranks:
        """The same ranks: there is no other thread."""
        return self

    def _next(self, kind: str, sender: int, receiver: int) -> Letter:
        self._counts[kind, sender, receiver] += 1
        return self._members, kind, sender, receiver, self._counts[kind, sender, receiver]

    def _keep(self, key: Letter, value: Any) -> Any:
        self.mail[key] = value
        return value

    def _kept(self, key: Letter, sender: int) -> Any:
        if key not in self.mail:
            raise NotYetSent(self._members[sender])
        return self.mail[key]


def join_fake_group(launch: Launch) -> Group:
    """A group of all ranks of this launch, none of which is there."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    options = FakeProcessGroup.Options()
    if hasattr(
        options, "simulate_uniform_ranks"
    ):  # torch 2.15: collectives give what ranks with the same numbers would
        options.simulate_uniform_ranks = True
    dist.init_process_group(
        "fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size, pg_options=options
    )
    assert dist.group.WORLD is not None
    return FakeGroup(dist.group.WORLD)
