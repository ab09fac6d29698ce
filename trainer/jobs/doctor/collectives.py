"""Every collective, at several sizes, over the groups of ranks that strategies use: how long does it take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.jobs.doctor.findings import ExaminedRanks
from trainer.parallel.ranks import Group

_STEP = 16  # from one size to the next
SIZES = tuple(2**12 * _STEP**power for power in range(4))  # bytes of the whole tensor: 4 KiB to 16 MiB
_LARGEST_ON_DEVICE = SIZES[-1] * _STEP  # where no processor has to copy it
_FEWEST, _MOST = 1, 20  # repetitions, beside a first one that makes connections and a second one that says how many
_GROUPS = 128  # of one name, at most: each is made by all ranks together
_GROWTH = 4.0  # a size is left out that would take so many times its share of the time


@dataclass(frozen=True)
class CollectiveTime:
    """How long one collective takes that nothing else overlaps with: the slowest rank, the median of repetitions."""

    op: str
    bytes: int  # of the whole tensor: what a gather collects, what a scatter divides
    group: str
    ranks: int  # of one such group; groups that do not overlap work at the same time
    seconds: float


@dataclass(frozen=True)
class _Buffers:
    """One rank's tensors of a collective, float32 zeros: whatever is added up stays a number."""

    whole: Tensor  # (elements,), a multiple of the ranks
    other: Tensor  # (elements,)
    parts: list[Tensor]  # views of `other`, one for each rank of the group: (elements / ranks,)
    part: Tensor  # (elements / ranks,)


Op = Callable[[_Buffers, Group, int], None]  # the last is the first rank of the group, among all ranks


def _reduce(x: _Buffers, group: Group, first: int) -> None:
    dist.reduce(x.whole, first, group=group.group)


def _all_reduce(x: _Buffers, group: Group, first: int) -> None:
    dist.all_reduce(x.whole, group=group.group)


def _broadcast(x: _Buffers, group: Group, first: int) -> None:
    dist.broadcast(x.whole, first, group=group.group)


def _scatter(x: _Buffers, group: Group, first: int) -> None:
    dist.scatter(x.part, x.parts if group.is_main else None, first, group=group.group)


def _gather(x: _Buffers, group: Group, first: int) -> None:
    dist.gather(x.part, x.parts if group.is_main else None, first, group=group.group)


def _all_gather(x: _Buffers, group: Group, first: int) -> None:
    dist.all_gather_into_tensor(x.whole, x.part, group=group.group)


def _reduce_scatter(x: _Buffers, group: Group, first: int) -> None:
    dist.reduce_scatter_tensor(x.part, x.whole, group=group.group)


def _all_to_all(x: _Buffers, group: Group, first: int) -> None:
    dist.all_to_all_single(x.other, x.whole, group=group.group)


# all ranks of the group take part in each; what travels is the whole, or its part of each rank
OPS: Mapping[str, Op] = {
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def plan_groups(site: ExaminedRanks) -> dict[str, list[list[int]]]:
    """The groups that are measured, by name: all ranks; those of a machine and fewer neighbours; one of each machine.

    Groups of one name do not overlap. Ranks of several machines must be dealt to them evenly and in order, as launchers
    do, or there are no groups inside machines.
    """
    size, machines = site.world.size, len(site.first_ranks())
    groups = {"all": [list(range(size))]}
    local = size // machines
    blocks = [list(range(start, start + local)) for start in range(0, size, local)] if size % machines == 0 else []
    if not blocks or any(len({site.machines[rank] for rank in block}) > 1 for block in blocks):
        return groups
    if machines > 1 and local > 1:
        groups["machine"] = blocks
        groups["across machines"] = [list(ranks) for ranks in zip(*blocks, strict=True)]
    count = 2
    while count < local:  # 2, 4, … neighbours: the tensor and context ranks of a strategy
        if local % count == 0 and size // count <= _GROUPS:
            groups[f"{count} neighbours"] = [list(range(start, start + count)) for start in range(0, size, count)]
        count *= 2
    return groups


def make_groups(site: ExaminedRanks, planned: Mapping[str, list[list[int]]]) -> dict[str, Group]:
    """Collective: this rank's group of each name."""
    groups = {}
    for name, members in planned.items():
        for ranks in members:
            # all ranks make each group, also those that are not in it
            group = dist.new_group(ranks)
            if isinstance(group, dist.ProcessGroup):  # this rank is in it
                groups[name] = Group(group)
    return groups


def time_collectives(
    site: ExaminedRanks, groups: Mapping[str, Group], cells: Sequence[tuple[str, str]], seconds: float
) -> list[CollectiveTime]:
    """Collective: time these pairs of group and collective; a size that would take too long is left out."""
    sizes = SIZES if site.device.type == "cpu" else (*SIZES, _LARGEST_ON_DEVICE)
    times, spent = [], 0.0
    for index, (name, op) in enumerate(cells):
        # what earlier ones have not used is shared among those that are left; if they took too much, a little is left
        share = max(seconds / len(cells) / 4, (seconds - spent) / (len(cells) - index)) / len(sizes)
        fastest = 0.0
        for size in sizes:
            repetitions, took = _repeat(site, groups[name], OPS[op], size, share)
            bytes = 4 * _elements(size, groups[name].size)
            times.append(CollectiveTime(op, bytes, name, groups[name].size, median(repetitions)))
            spent += took
            # the next size is 16 times as large, and so is what this one took more than the one before
            before, fastest = fastest, min(repetitions)
            if fastest + _STEP * max(0.0, fastest - before) * (before > 0) > _GROWTH * share:
                break
    return times


def _elements(size: int, ranks: int) -> int:
    """Numbers of 4 bytes, so many bytes or a little more, that divide into equal parts for the ranks."""
    return ceil(size / 4 / ranks) * ranks


def _repeat(site: ExaminedRanks, group: Group, op: Op, size: int, share: float) -> tuple[list[float], float]:
    """Collective: the seconds of the slowest rank at each repetition, and of all together, on all ranks alike."""
    elements = _elements(size, group.size)
    whole, other = (torch.zeros(elements, device=site.device) for _ in range(2))  # float32, (elements,)
    buffers = _Buffers(whole, other, list(other.chunk(group.size)), torch.zeros_like(whole[: elements // group.size]))
    first = dist.get_global_rank(group.group, 0)

    def once() -> float:
        site.begin()
        began = perf_counter()
        op(buffers, group, first)
        site.synchronize()
        return perf_counter() - began

    began = perf_counter()
    once()
    second = perf_counter()
    repetitions = [once()]
    # the slowest rank says how often, for all
    (cost,) = site.slowest([perf_counter() - second])
    repetitions += [once() for _ in range(min(_MOST, max(_FEWEST, int(share / cost))))]
    *seconds, took = site.slowest([*repetitions, perf_counter() - began])
    return seconds, took
