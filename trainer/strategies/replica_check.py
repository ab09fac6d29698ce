"""Do ranks that hold copies of a tensor still hold the same bits? Compared with each line, and before each save."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.messages import FatalRunError
from trainer.parallel.batch_norm import running_statistics
from trainer.parallel.buckets import PendingSums
from trainer.parallel.device_mesh import AXES, split_axes
from trainer.parallel.optimizer_state import EMA_PREFIX
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import bit_sums
from trainer.strategies.rank_context import RankContext

# How a tensor can be split: the axes of the mesh along which ranks hold different shards of it.
SPLITS = [kind for count in range(len(AXES)) for kind in combinations(AXES[1:], count)]
_CPU = torch.device("cpu")


class ReplicaDriftError(FatalRunError, RuntimeError):
    """Ranks hold different numbers in what is to be the same; the message names the first tensor, and who differs."""


class PendingComparison(NamedTuple):
    """What the ranks tell each other of one step, on its way."""

    step: int
    kinds: dict[str, int]  # of what this rank holds, by name: how it is split
    sums: dict[str, Tensor]  # by name, of its bits; 0-d int64, where it lies
    totals: PendingSums  # (ranks, kinds) int64: a row for each rank, with a sum for each kind


class NoReplicaCheck:
    """The copies of one loop's network. Here one of each tensor, so that there is nothing to compare."""

    def start(self, step: int) -> None:
        """Collective, at a line: start telling all ranks in a few bytes what this one holds after this step."""

    def check(self) -> None:
        """Collective where ranks differ, which all of them have heard: Drifted, the same on every rank."""

    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Collective: the same for what is to be saved of the network and its average. Waits for the answer."""


def make_replica_check(place: RankContext, network: nn.Module, at: Mapping[str, int] | None = None) -> NoReplicaCheck:
    """Collective: what compares the copies that the ranks of this place hold, unless nobody is to.

    `at`: where this rank is along each axis of the mesh; None: every rank holds the same.
    """
    if place.world.size == 1 or not place.machine.compare_copies:
        return NoReplicaCheck()
    return ReplicaCheck(place.world, place.device, network, at or {})


class ReplicaCheck(NoReplicaCheck):
    """The copies that several ranks hold: all of them, or those at the same place along some axes of a mesh."""

    def __init__(self, ranks: Ranks, device: torch.device, network: nn.Module, at: Mapping[str, int]) -> None:
        """Collective. `at`: where this rank is along each axis of the mesh; where there is none, all hold the same."""
        self._ranks, self._device = ranks, device
        self._parameters = dict(network.named_parameters())
        self._statistics = running_statistics(network).keys()  # the same on all ranks after `settle`
        places = ranks.all_gather_values(dict(at))  # all ranks, once; where each of them is
        self._groups = [_group_holders(places, kind) for kind in SPLITS]  # for each kind, groups of two ranks or more
        self._pending: PendingComparison | None = None  # at the last line

    @override
    def start(self, step: int) -> None:
        self._pending = self._start(step, self._parameters)

    @override
    def check(self) -> None:
        told, self._pending = self._pending, None
        if told is not None:
            self._check(told)

    @override
    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        own = self._parameters.keys() | self._statistics
        self._check(
            self._start(step, {name: x for name, x in state.items() if name in own or name.startswith(EMA_PREFIX)})
        )

    def _start(self, step: int, tensors: Mapping[str, Tensor]) -> PendingComparison:
        """Collective: begin to add up over all ranks a table of which each fills in its own row."""
        kinds = {name: SPLITS.index(split_axes(tensor)) for name, tensor in tensors.items()}
        kinds = {name: kind for name, kind in kinds.items() if self._groups[kind]}  # of others there is one copy
        # a number for each tensor is kept here, in case copies differ; their sums alone travel
        sums = bit_sums({name: tensors[name] for name in kinds})
        tables = {}
        for device in dict.fromkeys((self._device, _CPU)):  # parameters may be offloaded to the host
            table = torch.zeros(self._ranks.size, len(SPLITS), dtype=torch.int64, device=device)
            for kind in {*kinds.values()}:
                there = [one for name, one in sums.items() if kinds[name] == kind and one.device == device]
                if there:
                    table[self._ranks.rank, kind] = torch.stack(there).sum()
            tables[device.type] = table
        return PendingComparison(
            step, kinds, sums, PendingSums(tables, self._ranks, self._device)
        )  # all ranks; 64 bytes for each

    def _check(self, told: PendingComparison) -> None:
        """Collective where copies differ; every rank has the whole table, so all see the same."""
        rows = torch.stack([*told.totals.read().values()]).sum(0).tolist()
        for kind, groups in enumerate(self._groups):
            if any(len({rows[rank][kind] for rank in ranks}) > 1 for ranks in groups):
                self._raise_drift(told)

    def _raise_drift(self, told: PendingComparison) -> NoReturn:
        """Collective: say what differs, and on whom."""
        own = {name: (kind, int(told.sums[name])) for name, kind in told.kinds.items()}
        # all ranks, as the run ends; a number for each tensor
        hosts, held = zip(*self._ranks.all_gather_values((socket.gethostname(), own)), strict=True)
        # in the network's order, over all stages: the first tensor is the one that is named
        found: dict[str, str] = {}
        for name, kind in {name: kind for one in held for name, (kind, _) in one.items()}.items():
            for ranks in self._groups[kind]:
                values = {rank: held[rank][name][1] for rank in ranks if name in held[rank]}
                if len({*values.values()}) > 1:
                    found.setdefault(name, _describe_difference(values, hosts))
        (name, who), *others = found.items()
        more = f" (and in {len(others)} more)" if others else ""
        raise ReplicaDriftError(
            f"step {told.step}: the copies of the network have drifted apart: {who} in {name}{more}. Nothing of it is"
            " saved: the same command goes on from the newest checkpoint, if there is one.\nLook for code that changes"
            " weights on one rank alone (Task.after_step, a random number), or for a machine with faulty memory. Where"
            " ranks are to differ, or have different hardware: distributed.compare_copies=false"
        )


def _group_holders(places: Sequence[Mapping[str, int]], kind: Sequence[str]) -> list[list[int]]:
    """The ranks that hold the same pieces of what is split along these axes; stages hold different tensors anyway."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(place.get(axis) for axis in ("pipe", *kind)), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _describe_difference(values: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Which ranks differ from the most of them, and where they run; where no value has a majority nobody can say."""
    (right, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return f"ranks {_join_ranks(values)} hold different numbers (and nobody can say who is right)"
    wrong = [rank for rank, value in values.items() if value != right]
    rest = [rank for rank in values if rank not in wrong]
    named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in wrong)
    return f"{named} holds other numbers than ranks {_join_ranks(rest)}"


def _join_ranks(ranks: Mapping[int, int] | Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
