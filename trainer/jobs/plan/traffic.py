"""What a rank sends in a step, read from the collectives that its operators call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.data.nested_tensors import tensors

# Which operator is which collective.
_COLLECTIVES = {
    "c10d::allreduce_": "all-reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::allgather_into_tensor_coalesced_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::alltoall_": "all-to-all",
}
# The functional ones, which DTensor calls and waits for.
_FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """Calls of one kind over one group of ranks in a step."""

    op: str
    ranks: int  # of the group
    between: bool  # do they stand in several machines?
    waits: bool  # does the step stand still meanwhile?
    calls: float  # less than one, where it comes in every so many steps
    bytes: int  # of the whole tensor: what is reduced, what all hold of it together, what one sends to another

    @property
    def key(self) -> tuple[str, int, bool, bool]:
        """What calls have in common that are added up."""
        return self.op, self.ranks, self.between, self.waits

    def extended(self, longer: Collective, times: int) -> Collective:
        """These calls, and so often what another step has more of them."""
        calls, size = longer.calls - self.calls, longer.bytes - self.bytes
        return self.plus(replace(self, calls=times * calls, bytes=times * size))

    def plus(self, other: Collective) -> Collective:
        """Both together."""
        return replace(self, calls=self.calls + other.calls, bytes=self.bytes + other.bytes)

    @property
    def wire(self) -> float:
        """Bytes that this rank sends, by the rings that NCCL and gloo use: each rank passes on what it has to."""
        share = (self.ranks - 1) / self.ranks
        # an all-reduce is a reduce-scatter and an all-gather, each of which passes on all parts but one
        factors = {"all-reduce": 2 * share, "send": 1.0, "receive": 0.0, "broadcast": 1.0, "reduce": 1.0}
        return self.bytes * factors.get(self.op, share)


class Traffic:
    """The collectives of a step, added up by kind and group."""

    def __init__(self, per_machine: int) -> None:
        self._per_machine = per_machine  # ranks of one machine, which are neighbours
        self._groups: dict[str, ProcessGroup] = {}  # by the name that functional collectives say
        # Collective.key → calls, bytes
        self._sums: dict[tuple[str, int, bool, bool], list[int]] = {}

    def register_groups(self, groups: Iterable[ProcessGroup]) -> None:
        """The groups of the strategy: functional collectives say a name."""
        self._groups = {group.group_name: group for group in groups}

    def record(self, func: Any, args: Any, out: Any, phase: str) -> list[Tensor] | None:
        """Add a collective up; the tensors that it reads and fills, or None where the operator is none."""
        name = func.name().partition(".")[0]  # c10d::allreduce_ or _c10d_functional::all_reduce, without the overload
        if op := _COLLECTIVES.get(name):
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            # what is received and what is given; an all-reduce has one argument for both, and changes it in place
            sides = [list(tensors(list(arg) if isinstance(arg, list | tuple) else [arg])) for arg in args[:2]]
            waits = phase != "forward and backward"  # beside a backward it travels while others compute
        elif op := _FUNCTIONAL.get(name.partition("::")[2]) if "c10d_functional" in name else None:
            group = next(self._find_group(arg) for arg in reversed(args) if isinstance(arg, (str, torch.ScriptObject)))
            sides, waits = [[args[0]], list(tensors(out))], True
        else:
            return None
        # the larger side is the whole: of an all-gather what is received, of a reduce-scatter what is given
        self._add(op, group, max(_bytes(side) for side in sides), waits)
        return [tensor for side in sides for tensor in side]

    def _find_group(self, group: Any) -> ProcessGroup:
        return self._groups[group] if isinstance(group, str) else ProcessGroup.unbox(group)

    def take(self) -> list[Collective]:
        """All that has been counted since this was last called."""
        sums = [Collective(*key, calls, size) for key, (calls, size) in self._sums.items()]
        self._sums.clear()
        return sums

    def _add(self, op: str, group: ProcessGroup, size: int, waits: bool) -> None:
        if group.size() == 1:  # alone in its group a rank sends nothing
            return
        machines = {rank // self._per_machine for rank in dist.get_process_group_ranks(group)}
        sums = self._sums.setdefault((op, group.size(), len(machines) > 1, waits), [0, 0])
        sums[0] += 1
        sums[1] += size


def _bytes(pieces: Iterable[Tensor]) -> int:
    return sum(piece.nbytes for piece in pieces)
