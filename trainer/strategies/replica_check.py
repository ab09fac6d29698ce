"""Checks that ranks with copies of a tensor still hold the same bits: with each training line, before each save."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.messages import FatalRunError, format_names
from trainer.parallel.batch_norm import running_statistics
from trainer.parallel.buckets import PendingSums
from trainer.parallel.device_mesh import AXES, split_axes
from trainer.parallel.optimizer_state import EMA_PREFIX
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_statistics import bit_sums
from trainer.strategies.rank_context import RankContext

# ways to split a tensor: the axes of the mesh along which ranks hold different shards of it
SPLITS = [kind for count in range(len(AXES)) for kind in combinations(AXES[1:], count)]
SPLITS += [("expert",), ("expert", "tensor")]
_CPU = torch.device("cpu")


class ReplicaDriftError(FatalRunError, RuntimeError):
    """Copies of a tensor differ between ranks. The message names the first such tensor and the ranks."""


class PendingComparison(NamedTuple):
    """The sums of one step that all ranks send each other, not yet arrived."""

    step: int
    splits: dict[str, int]  # name of a tensor of this rank → how it is split, an index into SPLITS
    sums: dict[str, Tensor]  # name → the sum of its bits; 0-d int64, on its device
    totals: PendingSums  # (splits,) int64: what the ranks' shares of each way to split come to, 0 where all agree


class NoReplicaCheck:
    """There is only one copy of each tensor, or copies may differ: nothing is compared."""

    def start(self, step: int) -> None:
        """Collective, at a line: begin to send all ranks a few bytes about what this one holds after this step."""

    def check(self) -> None:
        """Collective if ranks differ, which all of them know then: ReplicaDriftError, the same on every rank."""

    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> list[str]:
        """Collective: the same at once for a state to be saved. Sentences for the user about what may differ in it."""
        return []


def make_replica_check(
    context: RankContext, network: nn.Module, places: Sequence[Mapping[str, int]] = ()
) -> NoReplicaCheck:
    """What compares the copies that the ranks hold, unless the configuration switches it off.

    `places`: where each rank is along each axis of the mesh; empty: every rank holds the same.
    """
    if context.world.size == 1 or not context.machine.compare_copies:
        return NoReplicaCheck()
    return ReplicaCheck(context.world, context.device, network, places or [{}] * context.world.size)


class ReplicaCheck(NoReplicaCheck):
    """Copies on all ranks, or on those ranks that are at the same place along some axes of a mesh."""

    def __init__(
        self, ranks: Ranks, device: torch.device, network: nn.Module, places: Sequence[Mapping[str, int]]
    ) -> None:
        """`places`: where each rank is along each axis of the mesh."""
        self._ranks, self._device = ranks, device
        self._parameters = dict(network.named_parameters())
        self._statistics = running_statistics(network).keys()  # the same on all ranks after `settle`
        buffers = {name for name, buffer in network.named_buffers() if buffer.is_floating_point()}
        self._own_buffers, self._has_saved = buffers - self._statistics, False  # which may differ
        # for each way to split, the groups of ranks (two or more) that hold the same
        self._groups = [_group_holders(places, axes) for axes in SPLITS]
        # for each way to split, the factor of this rank's sum, (splits,) int64
        self._factors = torch.tensor([_factor(ranks.rank, groups, split) for split, groups in enumerate(self._groups)])
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
    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> list[str]:
        names = self._parameters.keys() | self._statistics
        weights = {name: x for name, x in state.items() if name in names or name.startswith(EMA_PREFIX)}
        self._compare(self._start(step, weights))
        if self._has_saved:
            return []
        # once: what a forward writes there from its samples differs from the first step on. Also where this rank has
        # none of them: another stage of a pipeline may
        self._has_saved = True
        buffers = {name: state[name] for name in self._own_buffers if name in state}
        if not (differences := self._find_differences(self._start(step, buffers))):
            return []
        return [
            f"ranks hold different numbers in {format_names(differences, 5)}, as each has seen other samples: the curve"
            " depends on the number of processes, and a checkpoint holds the main rank's. trainer.gather(x) gives a"
            " forward the samples of all ranks (docs/one-curve.md)"
        ]

    def _start(self, step: int, tensors: Mapping[str, Tensor]) -> PendingComparison:
        """Collective: begin to add up the ranks' sums, with factors that cancel out where copies are equal."""
        splits = {name: SPLITS.index(split_axes(tensor)) for name, tensor in tensors.items()}
        splits = {name: split for name, split in splits.items() if self._groups[split]}  # the others have no copies
        # a number for each tensor stays here, in case copies differ; only the sums of these are sent
        sums = bit_sums({name: tensors[name] for name in splits})
        tables = {}
        for device in dict.fromkeys((self._device, _CPU)):  # parameters may be offloaded to the host
            row = torch.zeros(len(SPLITS), dtype=torch.int64, device=device)
            for split in {*splits.values()}:
                local = [x for name, x in sums.items() if splits[name] == split and x.device == device]
                if local:
                    row[split] = torch.stack(local).sum()
            tables[device.type] = _scramble(row) * self._factors.to(device)
        # all ranks; 56 bytes of each, however many there are
        return PendingComparison(step, splits, sums, PendingSums(tables, self._ranks, self._device))

    def _compare(self, pending: PendingComparison) -> None:
        """Collective if copies differ: ReplicaDriftError."""
        if not (differences := self._find_differences(pending)):
            return
        (name, who), *others = differences.items()
        more = f" (and in {len(others)} more)" if others else ""
        raise ReplicaDriftError(
            f"step {pending.step}: the copies of the network have drifted apart: {who} in {name}{more}. Nothing of it"
            " is saved: the same command goes on from the newest checkpoint, if there is one.\nLook for code that"
            " changes weights on one rank alone (Task.after_step, a random number), or for a machine with faulty"
            " memory. Where ranks are to differ, or have different hardware: distributed.compare_copies=false"
        )

    def _find_differences(self, pending: PendingComparison) -> dict[str, str]:
        """Collective if copies differ: the tensors in which they do, and the ranks with other numbers than most."""
        # every rank has the same totals, so all come to the same result
        if not torch.stack([*pending.totals.read().values()]).sum(0).any():
            return {}
        tensors = {name: (split, int(pending.sums[name])) for name, split in pending.splits.items()}
        # all ranks, as the run ends, or once; a number for each tensor
        hosts, tensors_of = zip(*self._ranks.all_gather_values((socket.gethostname(), tensors)), strict=True)
        # in the network's order, over all stages: the message names the first tensor
        differences: dict[str, str] = {}
        for name, split in {name: split for rank in tensors_of for name, (split, _) in rank.items()}.items():
            for ranks in self._groups[split]:
                values = {rank: tensors_of[rank][name][1] for rank in ranks if name in tensors_of[rank]}
                if len({*values.values()}) > 1:
                    differences.setdefault(name, _describe_difference(values, hosts))
        return differences


def _factor(rank: int, groups: Sequence[Sequence[int]], split: int) -> int:
    """What this rank multiplies its sum by: the factors of a group's ranks add up to 0, so equal sums cancel out.

    Each is a random number, odd but for the first rank's: a difference can cancel out only by a chance of 2^-60.
    """
    for first, *others in groups:
        if rank == first or rank in others:
            drawn = others if rank == first else [rank]
            total = sum(Random(f"{split} {other}").getrandbits(64) | 1 for other in drawn)
            return ((-total if rank == first else total) + 2**63) % 2**64 - 2**63  # as int64 wraps
    return 0


def _scramble(sums: Tensor) -> Tensor:
    """A number for each of these int64 numbers, no two the same, in which each bit follows from all bits.

    A difference in the highest bit alone would be lost in a product with an even number.
    """
    for shift, factor in ((32, 0x6A09E667F3BCC909), (29, 0x3C6EF372FE94F82B)):
        # without the mask the sign would move in from the left
        sums = (sums ^ ((sums >> shift) & (2 ** (64 - shift) - 1))) * factor
    return sums


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
