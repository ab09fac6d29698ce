"""Degrees of parallelism, the device mesh that they make, and which part of a tensor this rank holds on it."""

from __future__ import annotations

from itertools import product
from math import log, prod
from operator import itemgetter

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from trainer.messages import Refusal
from trainer.parallel.process_group import as_group
from trainer.parallel.ranks import Ranks

AXES = ("pipe", "replicate", "shard", "tensor")  # of parameters; the outermost first: neighbours are tensor ranks
# what a user says: context ranks hold copies or shards as data ranks do, and differ in which tokens they read
DEGREES = ("pipe", "replicate", "shard", "context", "tensor")


def resolve_degrees(world_size: int, wanted: dict[str, int | None]) -> dict[str, int]:
    """The degree of every axis; one that is None takes what the others leave. Refusal where that is not whole.

    wanted: axis → degree, in the order of DEGREES. The message says the product, and what would fit.
    """
    for axis, degree in wanted.items():
        if degree is not None and degree < 1:
            raise Refusal(f"strategy.{axis}={degree}: a degree is 1 (nothing) or more")
    taken = prod(degree for degree in wanted.values() if degree is not None)
    free = [axis for axis, degree in wanted.items() if degree is None]
    if world_size % taken or (not free and taken != world_size):
        raise Refusal(_mismatch(world_size, wanted, taken))
    filled = {axis: 1 if degree is None else degree for axis, degree in wanted.items()}
    return filled | ({free[0]: world_size // taken} if free else {})


def _mismatch(world_size: int, wanted: dict[str, int | None], taken: int) -> str:
    """The message: the product that does not fit, and the nearest that do, with other degrees or other processes."""
    named = {axis: degree for axis, degree in wanted.items() if degree is not None}
    rest = len(named) < len(wanted)  # does one axis take what the others leave?
    factors = " × ".join(f"strategy.{axis} {degree}" for axis, degree in named.items())
    started = f"{world_size} process{'es' if world_size > 1 else ''}"
    sentence = f"{factors} = {taken}, but {started} {'were' if world_size > 1 else 'was'} started"
    if rest:
        sentence = f"{started} / ({factors} = {taken}) is not whole"
    counts = sorted({max(world_size // taken, 1) * taken, -(-world_size // taken) * taken} if rest else {taken})
    processes = f"{' or '.join(map(str, counts))} process{'' if counts == [1] else 'es'}"
    return f"{sentence}; nearest: {', or '.join(_nearest_degrees(world_size, named, rest))}; or start {processes}"


def _nearest_degrees(world_size: int, named: dict[str, int], rest: bool) -> list[str]:
    """The two nearest changes of degrees that make the product fit, as few and as small as can be."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    changes: list[tuple[int, float, str]] = []
    for degrees in product(divisors, repeat=len(named)):
        if world_size % prod(degrees) == 0 if rest else prod(degrees) == world_size:
            other = {axis: d for axis, d in zip(named, degrees, strict=True) if d != named[axis]}
            distance = sum(abs(log(d / named[axis])) for axis, d in other.items())
            changes.append((len(other), distance, " ".join(f"strategy.{axis}={d}" for axis, d in other.items())))
    return [change for _, _, change in sorted(changes, key=itemgetter(0, 1))[:2]]


def format_degrees(degrees: dict[str, int]) -> str:
    """Degrees as a product, the outermost axis first."""
    return " × ".join(f"{axis} {degrees[axis]}" for axis in DEGREES if axis in degrees)


def make_mesh(device_type: str, degrees: dict[str, int], always: str) -> DeviceMesh:
    """Collective: the ranks as a device mesh. An axis of degree 1 is left out, unless it is `always`."""
    axes = {axis: degrees[axis] for axis in AXES if degrees.get(axis, 1) > 1 or axis == always}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def make_sequence_mesh(device_type: str, world_size: int, context: int, tensor: int) -> DeviceMesh:
    """Collective: the same ranks by what they read: other samples, other parts of their sequences, or the same."""
    degrees = {"samples": world_size // context // tensor, "context": context, "alike": tensor}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def places(mesh: DeviceMesh) -> list[dict[str, int]]:
    """Where each rank is along each axis of a mesh of all ranks, which lie in it row by row. No tensor is asked."""
    return [dict(zip(mesh.mesh_dim_names or (), index, strict=True)) for index in product(*map(range, mesh.shape))]


def ranks_along(mesh: DeviceMesh, *axes: str) -> Ranks:
    """Collective: the ranks that differ from this one along these axes only; alone where the mesh has none of them."""
    names = mesh.mesh_dim_names or ()
    present = [axis for axis in names if axis in axes]
    if not present:
        return Ranks()
    if len(present) == 1:
        return as_group(mesh.get_group(present[0]))
    # several axes: ranks that stand at the same place along all others are a group
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(mesh)):
        rows.setdefault(tuple(index for axis, index in place.items() if axis not in present), []).append(rank)
    group, _ = dist.new_subgroups_by_enumeration([*rows.values()])  # all ranks; such groups are made in one order
    assert isinstance(group, dist.ProcessGroup)  # every rank is in one of them
    return as_group(group)


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard if it is a DTensor, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_axes(tensor: Tensor) -> tuple[str, ...]:
    """The axes of the mesh along which ranks hold different shards of a tensor; empty if each holds all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    # FSDP2 over tensor parallelism has a placement that is_shard() denies: whatever is not replicated is split
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(axis for axis, placement in axes if not placement.is_replicate())
