"""Which rank writes which tensors of a checkpoint.

It follows from how tensors are sharded, and is kept while that stays.

Ranks that hold the same names in the same way need tell each other one hash: all else each of them knows by itself.
Where they differ (stages of a pipeline, owners of zero1), one of each kind tells the others once what it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    """How a rank holds a tensor, as plain values."""

    shape: tuple[int, ...]  # of the whole
    type: str
    bytes: int  # of the whole
    frozen: bool
    placements: tuple[str, ...] = ()  # along each axis of the mesh; none: every rank that has it holds all of it
    copied: tuple[bool, ...] = ()  # along which axes do ranks hold the same
    mesh: tuple[int, ...] = ()  # its shape
    ranks: tuple[int, ...] = ()  # in its order

    @property
    def alike(self) -> tuple[Any, ...]:
        """Shards of ranks for which this is equal fit together."""
        return self.placements, self.mesh


class LayoutGroup(NamedTuple):
    """Ranks that hold the same tensors in the same way."""

    spreads: Mapping[str, TensorLayout]
    ranks: tuple[int, ...]


class SavePlan:
    """What a rank writes of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], bytes: int, apart: bool) -> None:
        """bytes: of all ranks' tensors, each once; apart: is there more than the network."""
        self.bytes, self.apart = bytes, apart
        # a shard without elements is left out: readers have no need of it
        self._seen = {
            name: _layout_key(one) for name, one in tensors.items() if to_local(one).numel() or not one.numel()
        }
        self._examples = {self._seen[name]: one for name, one in tensors.items() if name in self._seen}
        self.names = [*self._seen]

    @cached_property
    def offsets(self) -> dict[str, list[int]]:
        """Where in the whole tensor the shard of this rank begins, by name. The first time it takes torch a while."""
        from torch.distributed.checkpoint import DefaultSavePlanner  # here: its import takes longer than a first step

        examples, self._examples = self._examples, {}  # many tensors are spread alike
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({str(at): one for at, one in enumerate(examples.values())})
        begins = {item.index.fqn: [*(item.index.offset or ())] for item in planner.create_local_plan().items}
        known = {seen: begins[str(at)] for at, seen in enumerate(examples)}
        return {name: known[seen] for name, seen in self._seen.items()}


class SavePlanner:
    """Who writes what, agreed by all ranks at each save."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seen: dict[str, tuple[Any, ...]] = {}  # how this rank's tensors were spread at the last save
        self._spreads: dict[str, TensorLayout] = {}  # the same, as other ranks can read it
        self._hashes: dict[str, str] = {}  # the same of each part
        self._told: list[dict[str, str]] = []  # those of all ranks
        self._kinds: list[LayoutGroup] = []
        self._shares: dict[bool, SavePlan] = {}  # without the frozen tensors, or with them

    def agree(
        self, tensors: Mapping[str, Tensor], frozen: Collection[str], same: bool, linked: Collection[str]
    ) -> tuple[SavePlan, set[str]]:
        """Collective: what this rank writes, and the names of frozen tensors that nobody need write.

        same: are this rank's frozen tensors as they are in an older checkpoint; linked: what the main rank has of it.
        FailedSave on all ranks where it fails on one.
        """
        # all ranks; a hash of each part, and of the names that the main rank has links for
        told = all_or_none(
            self._ranks, lambda: (self._hashed(tensors, frozen), same, _hash_of(sorted(linked))), FailedSave
        )
        hashes = [one for one, _, _ in told]
        if hashes != self._told:
            self._kinds, self._told, self._shares = self._gathered(hashes), hashes, {}
        still = {name for kind in self._kinds for name, one in kind.spreads.items() if one.frozen}
        there = still if all(one for _, one, _ in told) and _hash_of(sorted(still)) == told[0][2] else set()
        without = bool(there)
        if without not in self._shares:
            self._shares[without] = self._share(tensors, without)
        return self._shares[without], there

    def _hashed(self, tensors: Mapping[str, Tensor], frozen: Collection[str]) -> dict[str, str]:
        """How this rank holds the tensors: a hash of each part."""
        seen = {name: (*_layout_key(tensor), name in frozen) for name, tensor in tensors.items()}
        if seen != self._seen:
            spreads = {name: _make_layout(*one) for name, one in seen.items()}
            hashes = {part: _hash_of(own) for part, own in _by_component(spreads).items()}
            self._seen, self._spreads, self._hashes = seen, spreads, hashes
        return self._hashes

    def _gathered(self, hashes: list[dict[str, str]]) -> list[LayoutGroup]:
        """Collective where ranks differ: what each kind of them holds, in the order of their first ranks."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, one in enumerate(hashes):
            for item in one.items():
                kinds.setdefault(item, []).append(rank)
        parts = _by_component(self._spreads)
        if all(one == hashes[0] for one in hashes):
            return [LayoutGroup(parts[part], tuple(ranks)) for (part, _), ranks in kinds.items()]
        mine = {item: parts[item[0]] for item, ranks in kinds.items() if ranks[0] == self._ranks.rank}
        # all ranks; the first of each kind tells what it holds
        known = {item: own for one in self._ranks.all_gather_values(mine) for item, own in one.items()}
        return [LayoutGroup(known[item], tuple(ranks)) for item, ranks in kinds.items()]

    def _share(self, tensors: Mapping[str, Tensor], without: bool) -> SavePlan:
        """What this rank writes; `without`: no frozen tensor."""
        every: dict[str, list[LayoutGroup]] = {}
        for kind in self._kinds:
            for name, spread in kind.spreads.items():
                if not (spread.frozen and without):
                    every.setdefault(name, []).append(kind)
        own = [name for name in tensors if name in every]
        alone = all(
            len(kinds) == 1 and len(kinds[0].ranks) == self._ranks.size and not kinds[0].spreads[name].mesh
            for name, kinds in every.items()
        )
        mine = own if alone and self._ranks.is_main else [] if alone else list(self._chosen(own, every))
        sizes = {name: kinds[0].spreads[name].bytes for name, kinds in every.items()}
        apart = any(name.startswith(OTHER_PREFIXES) for name in every)
        return SavePlan({name: tensors[name] for name in mine}, sum(sizes.values()), apart)

    def _chosen(self, names: list[str], every: Mapping[str, list[LayoutGroup]]) -> Iterator[str]:
        """Of these tensors those that this rank writes. Ranks that hold the same share the work among themselves."""
        groups: dict[tuple[int, ...], list[str]] = {}
        known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for name in names:
            kinds, own = every[name], self._spreads[name]
            key = (tuple(map(id, kinds)), own.alike, own.copied, own.ranks, not own.bytes)
            if key not in known:
                known[key] = _ranks_with_same_shard(
                    self._ranks.rank, own, [(kind.spreads[name], kind.ranks) for kind in kinds]
                )
            groups.setdefault(known[key], []).append(name)
        for ranks, held_by_them in groups.items():
            if self._ranks.rank in ranks:
                ordered = sorted(held_by_them)  # all of them know these, and come to the same answer
                writers = assign_owners([self._spreads[name].bytes for name in ordered], len(ranks))
                yield from (name for name, at in zip(ordered, writers, strict=True) if ranks[at] == self._ranks.rank)


def _ranks_with_same_shard(
    rank: int, own: TensorLayout, every: list[tuple[TensorLayout, tuple[int, ...]]]
) -> tuple[int, ...]:
    """The ranks that hold the same part of a tensor as this one; none where others, spread otherwise, write it."""
    if own.alike != every[0][0].alike:
        return ()
    alike = [(spread, ranks) for spread, ranks in every if spread.alike == own.alike]
    if not own.mesh:
        return tuple(sorted(holder for _, ranks in alike for holder in ranks))
    at = (torch.tensor(own.ranks).view(own.mesh) == rank).nonzero()[0].tolist()
    # of what has no elements all ranks hold the same
    index = tuple(slice(None) if same or not own.bytes else one for same, one in zip(own.copied, at, strict=True))
    meshes = {spread.ranks: torch.tensor(spread.ranks).view(spread.mesh) for spread, _ in alike}
    return tuple(sorted({holder for mesh in meshes.values() for holder in mesh[index].reshape(-1).tolist()}))


def _layout_key(tensor: Tensor) -> tuple[Any, ...]:
    """All that decides about a tensor, quickly."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype, None, ()


def _make_layout(
    shape: torch.Size, type: torch.dtype, mesh: Any, placements: tuple[Any, ...], frozen: bool
) -> TensorLayout:
    whole = TensorLayout(tuple(shape), str(type), shape.numel() * type.itemsize, frozen)
    if mesh is None:
        return whole
    return whole._replace(
        placements=tuple(map(repr, placements)),
        copied=tuple(one.is_replicate() for one in placements),
        mesh=tuple(mesh.mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
    )


def _by_component(spreads: Mapping[str, TensorLayout]) -> dict[str, dict[str, TensorLayout]]:
    """The network's, the optimizer's …: ranks may hold the same of one, and not of another."""
    parts: dict[str, dict[str, TensorLayout]] = {}
    for name in sorted(spreads):
        part = name.split("/", 1)[0] if name.startswith(OTHER_PREFIXES) else ""
        parts.setdefault(part, {})[name] = spreads[name]
    return parts


def _hash_of(what: Any) -> str:
    return sha256(repr(what).encode()).hexdigest()
