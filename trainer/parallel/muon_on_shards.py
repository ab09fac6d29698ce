"""Muon needs whole matrices, and here ranks hold shards of them: each matrix has a rank that updates it.

In a step the shards of gradient and value travel to this owner, and those of the new value back to all that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from trainer.learning.optimizer import Groups, Make
from trainer.parallel.buckets import BUCKET_BYTES, make_buckets
from trainer.parallel.device_mesh import split_axes, to_local
from trainer.parallel.parameter_owners import assign_owners
from trainer.parallel.ranks import Ranks


class MatrixOwners:
    """Which rank updates which whole parameter, and how shards travel to it and back. The same on every rank."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks, places: Sequence[Mapping[str, int]]) -> None:
        """ranks: all that hold something of them; places: where in the mesh each of these is."""
        self._ranks, self._places = ranks, places
        owners = assign_owners([_work(parameter) for parameter in parameters], ranks.size)
        self._owner = dict(zip(parameters, owners, strict=True))
        # parameter → who sends its shard to the owner, and what each rank has of it, where this rank is the owner
        self._senders = {parameter: self._find_senders(parameter) for parameter in parameters}
        mine = [parameter for parameter in parameters if self.owns(parameter)]
        self._parts = {parameter: [_shard_at(parameter, place) for place in places] for parameter in mine}
        for parameter in parameters:  # a layout that is not known would mix up what travels
            part = _shard_at(parameter, places[ranks.rank])
            if [each.stop - each.start for each in part] != [*(held := to_local(parameter).shape)]:
                raise RuntimeError(f"a rank holds {[*held]} of {[*parameter.shape]}, which is not {part}")

    def _find_senders(self, parameter: Tensor) -> list[int]:
        """Of the ranks that hold the same shard one: that of the owner's own copy."""
        split, of_owner = split_axes(parameter), self._places[self._owner[parameter]]
        # experts lie on a grid of their own
        elsewhere = ("replicate", "shard") if "expert" in split else ("copies", "expert")
        common = {axis: index for axis, index in of_owner.items() if axis not in (*split, *elsewhere)}
        return [rank for rank, place in enumerate(self._places) if common.items() <= place.items()]

    def owns(self, parameter: Tensor) -> bool:
        """Is it this rank that updates this parameter?"""
        return self._owner[parameter] == self._ranks.rank

    def gather(self, shards: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Collective: parameter → this rank's shard of it, or of its gradient; returns the whole of what it owns."""
        whole: dict[Tensor, Tensor] = {}
        for bucket in self._buckets(shards):
            sent, spaces = self._lists(), self._lists()
            for parameter in bucket:
                shard = to_local(shards[parameter])
                if self._ranks.rank in self._senders[parameter]:
                    sent[self._owner[parameter]].append(shard)
                if self.owns(parameter):
                    whole[parameter] = shard.new_empty(parameter.shape)
                    for rank in self._senders[parameter]:
                        spaces[rank].append(whole[parameter][self._parts[parameter][rank]])
            self._exchange(sent, spaces, to_local(shards[bucket[0]]))
        return whole

    def scatter(self, whole: Mapping[Tensor, Tensor], parameters: Sequence[Tensor]) -> None:
        """Collective: the new values of these parameters, of which this rank owns some, to all that hold them."""
        for bucket in self._buckets(parameters):
            sent, spaces = self._lists(), self._lists()
            for parameter in bucket:
                spaces[self._owner[parameter]].append(to_local(parameter))
                for rank, part in enumerate(self._parts.get(parameter, ())):
                    sent[rank].append(whole[parameter][part])
            self._exchange(sent, spaces, to_local(bucket[0]))

    def _lists(self) -> list[list[Tensor]]:
        """What goes to each rank, or comes from it."""
        return [[] for _ in self._places]

    def _buckets(self, parameters: Any) -> list[list[Tensor]]:
        """What travels as one; by whole sizes, so that all ranks divide alike, and each sends about 25 MiB."""
        return make_buckets([*parameters], BUCKET_BYTES * self._ranks.size)

    def _exchange(self, sent: list[list[Tensor]], spaces: list[list[Tensor]], like: Tensor) -> None:
        """Collective: to each rank these tensors, and into these spaces what each has sent."""
        flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
        counts, expected = ([sum(x.numel() for x in tensors) for tensors in lists] for lists in (sent, spaces))
        # the ranks that hold these matrices; each shard once, to its owner or from it
        came = self._ranks.all_to_all(flat, counts, expected)
        inside = [space for tensors in spaces for space in tensors]
        for space, piece in zip(inside, came.split([space.numel() for space in inside]), strict=True):
            space.copy_(piece.view(space.shape))


def _work(parameter: Tensor) -> int:
    """About how long its update takes: products of a matrix with one of its smaller side."""
    rows = len(parameter) if parameter.dim() else 1
    return parameter.numel() * min(rows, parameter.numel() // max(rows, 1)) if parameter.dim() > 1 else rows


class MuonOnShards(Optimizer):
    """Muon around another Muon, for ranks that hold shards: its parameters are the network's own.

    The inner one gets stand-ins for those that must be whole. They have values and gradients during a step, on the rank
    that owns them, so state is there alone, and whole. Stepped as shards is what groups say is `elementwise`, and what
    they say is `stacked` where a rank's shard are whole matrices: it steps the experts that it holds.
    """

    def __init__(self, make: Make, groups: Groups, ranks: Ranks, places: Sequence[Mapping[str, int]]) -> None:
        whole = [p for group in groups if not group.get("elementwise") for p in group["params"]]
        shards = {p for group in groups if group.get("stacked") for p in group["params"] if _is_cut_into_matrices(p)}
        whole = [parameter for parameter in whole if parameter not in shards]
        self._owners = MatrixOwners(whole, ranks, places)
        self._stand_ins: dict[Tensor, nn.Parameter] = {p: _without_memory(p) for p in whole}
        self._parameters: dict[Tensor, Tensor] = {stand_in: p for p, stand_in in self._stand_ins.items()}
        inside = [{**group, "params": [self._stand_ins.get(p, p) for p in group["params"]]} for group in groups]
        self._inner = make(inside)
        outside = [
            {**group, "params": [self._parameters.get(p, p) for p in group["params"]]}
            for group in self._inner.param_groups
        ]
        super().__init__(outside, self._inner.defaults)

    def state_like(self, parameter: Tensor) -> Tensor | None:
        """What this rank's state of a parameter is shaped like: the whole, or its shard; None: it keeps none."""
        if parameter not in self._stand_ins:
            return parameter
        return self._stand_ins[parameter] if self._owners.owns(parameter) else None

    @torch.no_grad()
    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective: one step of every parameter that has a gradient."""
        used = [parameter for parameter in self._stand_ins if parameter.grad is not None]
        gradients = self._owners.gather({p: p.grad for p in used if p.grad is not None})
        for parameter, value in self._owners.gather({p: p for p in used}).items():
            stand_in = self._stand_ins[parameter]
            stand_in.data, stand_in.grad = value, gradients.pop(parameter)
        self._step_inner()
        mine = {p: self._stand_ins[p].data for p in used if self._owners.owns(p)}
        for parameter in mine:
            self._stand_ins[parameter].grad = None
            self._stand_ins[parameter].data = _without_memory(parameter).data
        self._owners.scatter(mine, used)

    def _step_inner(self) -> None:
        """The inner step, with the rates of this one's groups, and with its state, which a checkpoint may have set."""
        inner = self._inner
        for inside, outside in zip(inner.param_groups, self.param_groups, strict=True):
            inside.update({key: value for key, value in outside.items() if key != "params"})
        inner.state.clear()
        inner.state.update({self._stand_ins.get(p, p): memory for p, memory in self.state.items()})
        inner.step()
        self.state.update({self._parameters.get(p, p): memory for p, memory in inner.state.items()})


def _is_cut_into_matrices(stack: Tensor) -> bool:
    """Do ranks hold shards of a stack (n, rows, columns) that are whole matrices of it?"""
    return isinstance(stack, DTensor) and all(each.is_replicate() or each.is_shard(0) for each in stack.placements)


def _without_memory(parameter: Tensor) -> nn.Parameter:
    """A parameter of the whole shape, on this rank's device, in the memory of one number."""
    local = to_local(parameter)
    return nn.Parameter(local.new_zeros(()).expand(parameter.shape), requires_grad=parameter.requires_grad)


def _shard_at(tensor: Tensor, place: Mapping[str, int]) -> tuple[slice, ...]:
    """The part of a whole tensor that the rank at this place of the mesh holds: a slice of each dimension.

    place: axis → index. Of a tensor that is not split it is all of it.
    """
    ranges = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        axes = [*zip(mesh.mesh_dim_names or (), mesh.shape, placements, strict=True)]
        # what fully_shard cuts along the dimension that tensor ranks have cut stands before it, and is cut after it
        for axis, ranks, placement in sorted(axes, key=lambda each: hasattr(each[2], "split_factor")):
            if not placement.is_replicate():
                dim = placement.dim  # type: ignore[attr-defined]
                size = -(-len(ranges[dim]) // ranks)  # as torch.chunk: the last ranks may have less, or nothing
                ranges[dim] = ranges[dim][place[axis] * size : (place[axis] + 1) * size]
    return tuple(slice(part.start, part.stop) for part in ranges)
