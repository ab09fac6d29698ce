"""Checks that ranks with copies of a tensor still hold the same bits: with each training line, before each save."""

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

# ways to split a tensor: the axes of the mesh along which ranks hold different shards of it
SPLITS = [kind for count in range(len(AXES)) for kind in combinations(AXES[1:], count)]
_CPU = torch.device("cpu")


class ReplicaDriftError(FatalRunError, RuntimeError):
    """Copies of a tensor differ between ranks. The message names the first such tensor and the ranks."""


class PendingComparison(NamedTuple):
    """The sums of one step that all ranks send each other, not yet arrived."""

    step: int
    splits: dict[str, int]  # name of a tensor of this rank → how it is split, an index into SPLITS
    sums: dict[str, Tensor]  # name → the sum of its bits; 0-d int64, on its device
    totals: PendingSums  # (ranks, splits) int64: each rank has its row, with a sum for each way to split


class NoReplicaCheck:
    """There is only one copy of each tensor, or copies may differ: nothing is compared."""

    def start(self, step: int) -> None:
        """Collective, at a line: begin to send all ranks a few bytes about what this one holds after this step."""

    def check(self) -> None:
        """Collective if ranks differ, which all of them know then: ReplicaDriftError, the same on every rank."""

    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Collective: the same at once for the network and the average in a state to be saved."""


def make_replica_check(context: RankContext, network: nn.Module, at: Mapping[str, int] | None = None) -> NoReplicaCheck:
    """Collective: what compares the copies that the ranks hold, unless the configuration switches it off.

    `at`: where this rank is along each axis of the mesh; None: every rank holds the same.
    """
    if context.world.size == 1 or not context.machine.compare_copies:
        return NoReplicaCheck()
    return ReplicaCheck(context.world, context.device, network, at or {})


class ReplicaCheck(NoReplicaCheck):
    """Copies on all ranks, or on those ranks that are at the same place along some axes of a mesh."""

    def __init__(self, ranks: Ranks, device: torch.device, network: nn.Module, at: Mapping[str, int]) -> None:
        """Collective. `at`: where this rank is along each axis of the mesh; empty: all ranks hold the same."""
        self._ranks, self._device = ranks, device
        self._parameters = dict(network.named_parameters())
        self._statistics = running_statistics(network).keys()  # the same on all ranks after `settle`
        places = ranks.all_gather_values(dict(at))  # all ranks, once; where each of them is
        # for each way to split, the groups of ranks (two or more) that hold the same
        self._groups = [_group_holders(places, axes) for axes in SPLITS]
        self._pending: PendingComparison | None = None  # of the last line

    @override
    def start(self, step: int) -> None:
        self._pending = self._start(step, self._parameters)

    @override
    def check(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._compare(pending)

    @override
    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        names = self._parameters.keys() | self._statistics
        weights = {name: x for name, x in state.items() if name in names or name.startswith(EMA_PREFIX)}
        self._compare(self._start(step, weights))

    def _start(self, step: int, tensors: Mapping[str, Tensor]) -> PendingComparison:
        """Collective: begin to add up a table over all ranks, in which each fills its own row."""
        splits = {name: SPLITS.index(split_axes(tensor)) for name, tensor in tensors.items()}
        splits = {name: split for name, split in splits.items() if self._groups[split]}  # the others have no copies
        # a number for each tensor stays here, in case copies differ; only the sums of these are sent
        sums = bit_sums({name: tensors[name] for name in splits})
        tables = {}
        for device in dict.fromkeys((self._device, _CPU)):  # parameters may be offloaded to the host
            table = torch.zeros(self._ranks.size, len(SPLITS), dtype=torch.int64, device=device)
            for split in {*splits.values()}:
                local = [x for name, x in sums.items() if splits[name] == split and x.device == device]
                if local:
                    table[self._ranks.rank, split] = torch.stack(local).sum()
            tables[device.type] = table
        # all ranks; 64 bytes of each
        return PendingComparison(step, splits, sums, PendingSums(tables, self._ranks, self._device))

    def _compare(self, pending: PendingComparison) -> None:
        """Collective if copies differ. Every rank has the whole table, so all come to the same result."""
        rows = torch.stack([*pending.totals.read().values()]).sum(0).tolist()
        for split, groups in enumerate(self._groups):
            if any(len({rows[rank][split] for rank in ranks}) > 1 for ranks in groups):
                self._raise_drift(pending)

    def _raise_drift(self, pending: PendingComparison) -> NoReturn:
        """Collective: find the tensors that differ, and the ranks that have other numbers than most."""
        tensors = {name: (split, int(pending.sums[name])) for name, split in pending.splits.items()}
        # all ranks, as the run ends; a number for each tensor
        hosts, tensors_of = zip(*self._ranks.all_gather_values((socket.gethostname(), tensors)), strict=True)
        # in the network's order, over all stages: the message names the first tensor
        differences: dict[str, str] = {}
        for name, split in {name: split for rank in tensors_of for name, (split, _) in rank.items()}.items():
            for ranks in self._groups[split]:
                values = {rank: tensors_of[rank][name][1] for rank in ranks if name in tensors_of[rank]}
                if len({*values.values()}) > 1:
                    differences.setdefault(name, _describe_difference(values, hosts))
        (name, who), *others = differences.items()
        more = f" (and in {len(others)} more)" if others else ""
        raise ReplicaDriftError(
            f"step {pending.step}: the copies of the network have drifted apart: {who} in {name}{more}. Nothing of it"
            " is saved: the same command goes on from the newest checkpoint, if there is one.\nLook for code that"
            " changes weights on one rank alone (Task.after_step, a random number), or for a machine with faulty"
            " memory. Where ranks are to differ, or have different hardware: distributed.compare_copies=false"
        )


def _group_holders(places: Sequence[Mapping[str, int]], axes: Sequence[str]) -> list[list[int]]:
    """Groups of ranks that hold the same pieces of tensors split along these axes, and are of the same stage."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(place.get(axis) for axis in ("pipe", *axes)), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _describe_difference(values: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Which ranks differ from the majority, and where they run; without a majority all ranks are named."""
    (right, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return f"ranks {_join_ranks(values)} hold different numbers (and nobody can say who is right)"
    wrong = [rank for rank, value in values.items() if value != right]
    right_ranks = [rank for rank in values if rank not in wrong]
    wrong_ranks = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in wrong)
    return f"{wrong_ranks} holds other numbers than ranks {_join_ranks(right_ranks)}"


def _join_ranks(ranks: Mapping[int, int] | Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
