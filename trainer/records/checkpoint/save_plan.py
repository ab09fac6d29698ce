"""Which rank writes which tensors of a checkpoint.

The plan follows from how tensors are sharded, and is kept as long as that stays the same.

It is agreed on once for each layout: at later saves ranks send a byte. Ranks with the same layout exchange one hash,
since each of them knows all else by itself. Where layouts differ (stages of a pipeline, owners of zero1), one rank of
each group sends its layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.messages import FatalRunError
from trainer.parallel.device_mesh import to_local
from trainer.parallel.optimizer_state import OTHER_PREFIXES
from trainer.parallel.parameter_owners import assign_owners
from trainer.parallel.ranks import Ranks, all_or_none


class FailedSave(FatalRunError):
    """A checkpoint could not be written; the older ones are as they were."""


class TensorLayout(NamedTuple):
    """How a rank holds a tensor, as plain values that ranks can send and compare."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    nbytes: int  # of the whole tensor
    placements: tuple[str, ...] = ()  # along each axis of the mesh; none: every rank that has it holds all of it
    replicated: tuple[bool, ...] = ()  # along which of these axes do ranks hold the same
    mesh_shape: tuple[int, ...] = ()
    mesh_ranks: tuple[int, ...] = ()  # row by row

    @property
    def sharding(self) -> tuple[Any, ...]:
        """Shards of ranks for which this is equal fit together."""
        return self.placements, self.mesh_shape


class LayoutGroup(NamedTuple):
    """Ranks that hold the same tensors of one component in the same way."""

    layouts: Mapping[str, TensorLayout]
    ranks: tuple[int, ...]


class SavePlan:
    """What this rank writes of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], nbytes: int, has_other_state: bool) -> None:
        """nbytes: of all ranks' tensors, each once; has_other_state: is there more than the network."""
        self.nbytes, self.has_other_state = nbytes, has_other_state
        # a shard without elements is left out: readers have no need of it
        written = {name: tensor for name, tensor in tensors.items() if to_local(tensor).numel() or not tensor.numel()}
        self._keys = {name: _layout_key(tensor) for name, tensor in written.items()}
        self._examples = {self._keys[name]: tensor for name, tensor in written.items()}  # one for each layout
        self.names = [*self._keys]

    @cached_property
    def offsets(self) -> dict[str, list[int]]:
        """Where in the whole tensor this rank's shard begins, by name. The first time it takes torch a while."""
        from torch.distributed.checkpoint import DefaultSavePlanner  # here: its import takes longer than a first step

        # torch plans one tensor of each layout; all others of this layout begin at the same place
        examples, self._examples = self._examples, {}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({str(number): tensor for number, tensor in enumerate(examples.values())})
        planned = {item.index.fqn: [*(item.index.offset or ())] for item in planner.create_local_plan().items}
        offsets_by_key = {key: planned[str(number)] for number, key in enumerate(examples)}
        return {name: offsets_by_key[key] for name, key in self._keys.items()}


class SavePlanner:
    """Agrees with the planners of all ranks about who writes what, at each save."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._keys: dict[str, tuple[Any, ...]] = {}  # by name, the layouts of this rank's tensors at the last save
        self._layouts: dict[str, TensorLayout] = {}  # the same, as other ranks can read it
        self._hashes: dict[str, str] = {}  # by component, a hash of its layouts
        self._planned: dict[str, str] | None = None  # those that the present plan is for
        self._plan = SavePlan({}, 0, has_other_state=False)

    def plan(self, tensors: Mapping[str, Tensor]) -> SavePlan:
        """Collective: what this rank writes. FailedSave on all ranks where it fails on one."""
        hashes = all_or_none(self._ranks, lambda: self._hash_layouts(tensors), FailedSave)
        # all ranks; a byte: is a layout another one than at the last save?
        (new_layout,) = self._ranks.max_values([hashes != self._planned])
        if new_layout:
            self._planned, self._plan = hashes, self._make_plan(tensors, self._gather_groups(hashes))
        return self._plan

    def _hash_layouts(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """By component, a hash of how this rank holds its tensors; made anew only where a layout has changed."""
        keys = {name: _layout_key(tensor) for name, tensor in tensors.items()}
        if keys != self._keys:
            self._keys, self._layouts = keys, {name: _make_layout(*key) for name, key in keys.items()}
            components = _by_component(self._layouts)
            self._hashes = {component: _hash_of(layouts) for component, layouts in components.items()}
        return self._hashes

    def _gather_groups(self, hashes: dict[str, str]) -> list[LayoutGroup]:
        """Collective: the layouts of each group of ranks, in the order of their first ranks."""
        components = _by_component(self._layouts)
        # all ranks; 16 bytes: a hash that is the largest and the smallest is the only one
        digest = int(_hash_of(hashes)[:15], 16)
        bounds = torch.tensor([digest, -digest])
        self._ranks.all_reduce_max_(bounds).wait()
        if not bounds.sum():
            everybody = tuple(range(self._ranks.size))
            return [LayoutGroup(layouts, everybody) for layouts in components.values()]
        all_hashes = self._ranks.all_gather_values(hashes)  # all ranks; a hash of each component
        ranks_of: dict[tuple[str, str], list[int]] = {}  # component and hash → the ranks that hold it so
        for rank, hashes in enumerate(all_hashes):
            for item in hashes.items():
                ranks_of.setdefault(item, []).append(rank)
        mine = {item: components[item[0]] for item, ranks in ranks_of.items() if ranks[0] == self._ranks.rank}
        # all ranks; the first of each group sends its layouts
        layouts_of = {item: layouts for sent in self._ranks.all_gather_values(mine) for item, layouts in sent.items()}
        return [LayoutGroup(layouts_of[item], tuple(ranks)) for item, ranks in ranks_of.items()]

    def _make_plan(self, tensors: Mapping[str, Tensor], groups: Sequence[LayoutGroup]) -> SavePlan:
        """What this rank writes, given the groups that all ranks know."""
        groups_of: dict[str, list[LayoutGroup]] = {}  # by the name of a tensor
        for group in groups:
            for name in group.layouts:
                groups_of.setdefault(name, []).append(group)
        names = [name for name in tensors if name in groups_of]
        # where every rank has all of everything, as in DDP, the main rank writes alone
        all_replicated = all(
            len(groups) == 1 and len(groups[0].ranks) == self._ranks.size and not groups[0].layouts[name].mesh_shape
            for name, groups in groups_of.items()
        )
        if all_replicated:
            mine = names if self._ranks.is_main else []
        else:
            mine = list(self._select_mine(names, groups_of))
        nbytes = sum(groups[0].layouts[name].nbytes for name, groups in groups_of.items())
        has_other_state = any(name.startswith(OTHER_PREFIXES) for name in groups_of)
        return SavePlan({name: tensors[name] for name in mine}, nbytes, has_other_state)

    def _select_mine(self, names: list[str], groups_of: Mapping[str, list[LayoutGroup]]) -> Iterator[str]:
        """Of these tensors those that this rank writes. Ranks that hold the same share the work among themselves."""
        names_by_holders: dict[tuple[int, ...], list[str]] = {}
        known: dict[tuple[Any, ...], tuple[int, ...]] = {}  # many tensors are sharded alike
        for name in names:
            groups, layout = groups_of[name], self._layouts[name]
            key = (tuple(map(id, groups)), layout.sharding, layout.replicated, layout.mesh_ranks, not layout.nbytes)
            if key not in known:
                layouts = [(group.layouts[name], group.ranks) for group in groups]
                known[key] = _ranks_with_same_shard(self._ranks.rank, layout, layouts)
            names_by_holders.setdefault(known[key], []).append(name)
        for holders, held_names in names_by_holders.items():
            if self._ranks.rank in holders:
                ordered = sorted(held_names)  # all holders know these, and come to the same answer
                writers = assign_owners([self._layouts[name].nbytes for name in ordered], len(holders))
                pairs = zip(ordered, writers, strict=True)
                yield from (name for name, writer in pairs if holders[writer] == self._ranks.rank)


def _ranks_with_same_shard(
    rank: int, layout: TensorLayout, layouts: list[tuple[TensorLayout, tuple[int, ...]]]
) -> tuple[int, ...]:
    """The ranks that hold the same part of a tensor as this one; none where others, sharded otherwise, write it.

    layouts: every layout of this tensor, and the ranks that have it.
    """
    if layout.sharding != layouts[0][0].sharding:
        return ()
    alike = [(other, ranks) for other, ranks in layouts if other.sharding == layout.sharding]
    if not layout.mesh_shape:
        return tuple(sorted(holder for _, ranks in alike for holder in ranks))
    coordinates = (torch.tensor(layout.mesh_ranks).view(layout.mesh_shape) == rank).nonzero()[0].tolist()
    # along replicated axes all ranks hold the same; of what has no elements they do along every axis
    axes = zip(layout.replicated, coordinates, strict=True)
    index = tuple(slice(None) if same or not layout.nbytes else coordinate for same, coordinate in axes)
    meshes = {other.mesh_ranks: torch.tensor(other.mesh_ranks).view(other.mesh_shape) for other, _ in alike}
    return tuple(sorted({holder for mesh in meshes.values() for holder in mesh[index].reshape(-1).tolist()}))


def _layout_key(tensor: Tensor) -> tuple[Any, ...]:
    """All that decides about a tensor's layout, quickly."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype, None, ()


def _make_layout(shape: torch.Size, dtype: torch.dtype, mesh: Any, placements: tuple[Any, ...]) -> TensorLayout:
    layout = TensorLayout(tuple(shape), str(dtype), shape.numel() * dtype.itemsize)
    if mesh is None:
        return layout
    return layout._replace(
        placements=tuple(map(repr, placements)),
        replicated=tuple(placement.is_replicate() for placement in placements),
        mesh_shape=tuple(mesh.mesh.shape),
        mesh_ranks=tuple(mesh.mesh.flatten().tolist()),
    )


def _by_component(layouts: Mapping[str, TensorLayout]) -> dict[str, dict[str, TensorLayout]]:
    """The network's, the optimizer's …: ranks may hold the same of one, and not of another."""
    components: dict[str, dict[str, TensorLayout]] = {}
    for name in sorted(layouts):
        component = name.split("/", 1)[0] if name.startswith(OTHER_PREFIXES) else ""
        components.setdefault(component, {})[name] = layouts[name]
    return components


def _hash_of(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()
