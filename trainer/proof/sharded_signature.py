"""Tensors signed into a record: of what ranks hold shards of each signs its own, and ten numbers of each travel."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from trainer.parallel.ranks import Group
from trainer.proof.record import Key, Record
from trainer.proof.signature import joined, signatures, whole


class Signing:
    """Signs tensors as they come. What is cut into shards is in the record once all of its ranks call `join`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._shards: dict[ProcessGroup, dict[Key, Tensor]] = {}  # who holds shards of it → signatures of this rank's

    def add(self, key: Key, tensor: Tensor) -> None:
        """Sign a tensor, if somebody will ask for it. Collective where it is cut along several dimensions."""
        if not self._record.wants(key.phase):
            return
        if isinstance(tensor, DTensor) and len(cut := _cut(tensor)) == 1 and type(tensor.placements[cut[0]]) is Shard:
            self._shards.setdefault(tensor.device_mesh.get_group(cut[0]), {})[key] = _of_shard(tensor, cut[0])
            return
        full = whole(tensor)
        if _turn(tensor, key):
            self._record.add(key, [0], signatures(full.reshape(1, -1)))

    def join(self) -> None:
        """Collective: add up the signatures of shards; each sum is told by one of those who have a part of it."""
        for group, parts in self._shards.items():
            ranks = Group(group)
            mine = tuple(parts), torch.cat([*parts.values()])
            every = ranks.all_gather_values(mine)  # who holds the shards; ten numbers for each tensor
            tables = [dict(zip(keys, table.split(1), strict=True)) for keys, table in every]
            for key in parts:
                # what another one has nothing of is not whole
                if _told_by(key, ranks.size) == ranks.rank and all(key in table for table in tables):
                    self._record.add(key, [0], joined([table[key] for table in tables]))
        self._shards = {}


def _cut(tensor: DTensor) -> list[int]:
    """The dimensions of its mesh along which it is no copy: copies are looked at one by one."""
    return [at for at, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def _of_shard(tensor: DTensor, at: int) -> Tensor:
    """The signature of this rank's shard, with zeros in the place of the others. at: the dimension of the mesh."""
    dim, mine = tensor.placements[at].dim, tensor.to_local().detach()  # type: ignore[attr-defined]
    size, mesh = tensor.shape[dim], tensor.device_mesh
    start = min(size, -(-size // mesh.size(at)) * mesh.get_local_rank(at))  # as torch.chunk cuts
    if dim == 0:  # one stretch of its numbers
        return signatures(mine.reshape(1, mine.numel()), start * tensor.shape[1:].numel())
    full = mine.new_zeros(tensor.shape)
    full.narrow(dim, start, mine.shape[dim]).copy_(mine)
    return signatures(full.reshape(1, -1))


def _turn(tensor: Tensor, key: Key) -> bool:
    """Is it this rank's turn to tell it? What ranks hold shards of is the same for all of them, so one is enough."""
    if not isinstance(tensor, DTensor):
        return True
    at, ranks = 0, 1
    for dim in _cut(tensor):
        size = tensor.device_mesh.size(dim)
        at, ranks = at * size + tensor.device_mesh.get_local_rank(dim), ranks * size
    return _told_by(key, ranks) == at


def _told_by(key: Key, ranks: int) -> int:
    return crc32(key.name.encode()) % ranks
