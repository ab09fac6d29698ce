"""Whole parameters divided among ranks (ZeRO-1): gradients travel to the owner of each, its new values to all."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.buckets import make_buckets, pack, unpack
from trainer.parallel.ranks import COMPLETED, Group, Waitable


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank owns each of these tensors: the largest first, each to the rank that has least by then.

    The same answer on every rank. The fullest rank has at most the largest tensor more than the emptiest (R. Graham,
    Bounds on multiprocessing timing anomalies, 1969).
    """
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the emptiest first, of equals the lowest rank
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owner[index] = loads[0]
        heapreplace(loads, (load + sizes[index], owner[index]))
    return owner


class Bucket(NamedTuple):
    """Parameters of one owner and one type, which travel together."""

    owner: int
    parameters: list[Tensor]


def make_owner_buckets(parameters: Sequence[Tensor], owner: Sequence[int], most_bytes: int) -> list[Bucket]:
    """The parameters in buckets of up to so many bytes, in the order in which a backward fills them."""
    # a backward comes to the last parameters first
    order = {parameter: position for position, parameter in enumerate(reversed(parameters))}
    # one owner and one type a bucket: a reduce has one goal, a flat tensor one type
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter, rank in zip(order, reversed(owner), strict=True):
        alike.setdefault((rank, parameter.dtype), []).append(parameter)
    owned = [Bucket(rank, full) for (rank, _), tensors in alike.items() for full in make_buckets(tensors, most_bytes)]
    return sorted(owned, key=lambda bucket: order[bucket.parameters[-1]])


class GradientReducer:
    """Sends gradients to the owners of their parameters while the last backward of a step still runs.

    A bucket leaves when its last gradient has come, but not before those in front of it: all ranks send the same
    buckets in the same order, whichever gradients they have. What a rank has no gradient for counts as zero.
    """

    def __init__(self, buckets: list[Bucket], ranks: Group) -> None:
        self._buckets, self._ranks = buckets, ranks
        self._bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket.parameters}
        self._awaited: list[set[Tensor]] = []  # of each bucket, during a last backward
        self._under_way: list[tuple[Bucket, Tensor, Waitable]] = []
        self._sent: set[Tensor] = set()  # those that had a gradient when their bucket left
        # a hook that held this object would keep it, and the group, beyond the run: no collector sees through torch
        arrived = WeakMethod(self._arrived)

        def hook(parameter: Tensor) -> None:
            if (method := arrived()) is not None:
                method(parameter)

        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """The next backward is the last one of this step: what it completes may leave."""
        self._awaited = [set(bucket.parameters) for bucket in self._buckets]

    def finish(self) -> None:
        """Collective: after the last backward. `.grad` becomes the mean over the ranks at the owner, None elsewhere.

        It is None also at the owner where no rank had a gradient.
        """
        self._awaited = []  # what comes now is of no last backward
        # buckets that waited for a gradient which never came: zeros stand for it
        for bucket in self._buckets[len(self._under_way) :]:
            self._send(bucket)
        # zeros must not look like a gradient where no rank had one, or the optimizer would decay unused weights
        used, again = self._agree()
        for bucket in again:
            self._send(bucket)
        # only now is anything waited for: all buckets have travelled side by side
        for bucket, flat, work in self._under_way:
            work.wait()
            if bucket.owner == self._ranks.rank:
                _set_gradients(bucket, flat.div_(self._ranks.size), used)
        self._under_way, self._sent = [], set()

    def _arrived(self, parameter: Tensor) -> None:
        """A backward has completed this parameter's gradient."""
        if not self._awaited:  # of an earlier micro-batch
            return
        self._awaited[self._bucket_of[parameter]].discard(parameter)
        # in order, also where a later bucket is complete before: ranks complete them at different moments
        while len(self._under_way) < len(self._buckets) and not self._awaited[len(self._under_way)]:
            self._send(self._buckets[len(self._under_way)])

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Start adding up a bucket's gradients at their owner; here their memory is free once they are in one piece."""
        flat = pack([torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters])  # (numbers,)
        self._sent.update(p for p in bucket.parameters if p.grad is not None)
        for parameter in bucket.parameters:
            parameter.grad = None
        # these ranks; every gradient travels once
        sent = dist.reduce(flat, group_dst=bucket.owner, group=self._ranks.group, async_op=True)
        self._under_way.append((bucket, flat, sent or COMPLETED))

    def _agree(self) -> tuple[set[Tensor], list[Bucket]]:
        """Collective: what any rank has a gradient for, and the buckets that some rank must send once more.

        A parameter that several segments share which are recomputed by nested backwards completes more than once.
        """
        if not self._buckets:
            return set(), []
        sent = [(p in self._sent) + (p.grad is not None) for p in self._bucket_of]
        # these ranks; a byte a parameter: 1 sent, 2 more came after that
        times_sent = dict(zip(self._bucket_of, self._ranks.max_values(sent), strict=True))
        again = [bucket for bucket in self._buckets if any(times_sent[p] > 1 for p in bucket.parameters)]
        return {parameter for parameter, times in times_sent.items() if times}, again


def _set_gradients(bucket: Bucket, flat: Tensor, used: set[Tensor]) -> None:
    """Give the owner's parameters their gradients: views, or copies where the parameter's memory has another order."""
    for parameter, piece in zip(bucket.parameters, unpack(flat, bucket.parameters), strict=True):
        if parameter not in used:
            continue
        gradient = piece if parameter.is_contiguous() else torch.empty_like(parameter, requires_grad=False).copy_(piece)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@torch.no_grad()
def broadcast_from_owners(buckets: list[Bucket], ranks: Group) -> None:
    """Collective: every parameter becomes what its owner holds. All buckets are under way at once."""
    under_way: list[tuple[Bucket, Tensor, Waitable]] = []
    for bucket in buckets:
        flat = pack(bucket.parameters)
        # these ranks; every parameter travels once
        sent = dist.broadcast(flat, group_src=bucket.owner, group=ranks.group, async_op=True)
        under_way.append((bucket, flat, sent or COMPLETED))
    for bucket, flat, work in under_way:
        work.wait()
        if bucket.owner != ranks.rank:
            for parameter, value in zip(bucket.parameters, unpack(flat, bucket.parameters), strict=True):
                parameter.copy_(value)
