"""What a training of a few steps leaves to be compared: signatures of tensors, in the order of time."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from trainer.parallel.ranks import Group, Ranks
from trainer.verify.batch_dim_detection import Layout
from trainer.verify.tensor_sketch import LENGTH, WIDTH, joined, signatures, whole

# The phases of a step, in the order of time.
INITIAL, DATA, FORWARD, LOSS, GRADIENT = "initial values", "data", "forward", "loss", "gradient"
NORM, RATE, CLIPPED, STEP = "norm", "learning rate", "clipped gradient", "optimizer step"
UPDATE, RESUME, EVALUATION = "update", "resume", "evaluation"


class Key(NamedTuple):
    """What a signature is of."""

    step: int  # from 1 on; 0: before the first
    phase: str
    name: str  # of a module, a parameter, a part of the loss
    call: int = 0  # of a module in one forward


@dataclass
class Record:
    """Signatures by what they are of; the keys stand in the order of time."""

    values: dict[Key, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)  # rows, their signatures
    layouts: dict[tuple[str, str, int], Layout] = field(default_factory=dict)  # phase, name, call → where samples lie
    # the same of what a rank has only a part of
    parts: dict[Key, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what it is a record of
    floors: dict[Key, float] = field(default_factory=dict)  # how far rounding alone takes it, relative to its norm

    phases: Collection[str] | None = None  # of which somebody will ask; None: of all

    def wants(self, phase: str) -> bool:
        """Will somebody ask for it?"""
        return self.phases is None or phase in self.phases

    def add(self, key: Key, rows: Sequence[int], signatures: Tensor) -> None:
        """Keep the signatures of these rows: samples of the global batch, or 0 of what is one thing."""
        self.values.setdefault(key, []).append((rows, signatures))

    def join(self, ranks: Ranks) -> None:
        """Collective: what these ranks have parts of becomes whole on each of them, where all of them have one."""
        every = ranks.all_gather_values(self.parts)  # these ranks; a few numbers for each sample and module
        for key, own in self.parts.items():
            others = [other.get(key, []) for other in every]
            if all([rows for rows, _ in other] == [rows for rows, _ in own] for other in others):
                for at, (rows, _) in enumerate(own):
                    self.add(key, rows, joined([other[at][1] for other in others]))
        self.parts = {}

    def table(self, key: Key, least: int = 0) -> Tensor:
        """(rows, 10): the signatures of all rows of a key, so many at least; zeros where one has no such thing."""
        rows = torch.tensor([row for part, _ in self.values[key] for row in part])
        table = torch.zeros(max(least, 1 + int(rows.max())), WIDTH, dtype=torch.float64)
        table[rows] = torch.cat([signatures for _, signatures in self.values[key]])
        return table

    def rows(self, key: Key, rows: Sequence[int]) -> Tensor:
        """(len(rows), 10): the signatures of these rows of a key; zeros where one has no such thing."""
        least = 1 + max(rows, default=0)
        (of, own), *others = self.values[key]
        # as a rule one process has all of it, in order
        table = own if not others and [*of] == [*range(max(least, len(own)))] else self.table(key, least)
        return table if len(rows) == len(table) == 1 else table[list(rows)]

    def norms(self, keys: Sequence[Key]) -> list[float]:
        """The largest norm of each of these keys: all at once, for they are thousands."""
        sizes = [sum(len(rows) for rows, _ in self.values[key]) for key in keys]
        every = torch.cat([signatures[:, LENGTH] for key in keys for _, signatures in self.values[key]]).tolist()
        ends = [*accumulate(sizes, initial=0)]
        return [max(every[begin:end], default=0.0) for begin, end in pairwise(ends)]

    def write(self, path: Path) -> None:
        """Write a whole record to a file of safetensors."""
        tables = [self.table(key) for key in self.values]
        layouts = [[*key, *layout] for key, layout in self.layouts.items()]
        floors = [self.floors.get(key, 0.0) for key in self.values]
        told = {"keys": [*self.values], "layouts": layouts, "facts": self.facts, "floors": floors}
        told["rows"] = [len(table) for table in tables]  # one tensor of all: thousands take long to write and read
        path.unlink(missing_ok=True)  # it may be a link
        save_file({"signatures": torch.cat(tables)}, path, {name: json.dumps(value) for name, value in told.items()})

    @classmethod
    def read(cls, path: Path) -> Record:
        """What `write` has written."""
        with safe_open(path, "pt") as file:
            told = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            keys = [Key(*key) for key in told["keys"]]
            tables = file.get_tensor("signatures").split(told["rows"])
        values: dict[Key, list[tuple[Sequence[int], Tensor]]]
        values = {key: [(range(len(table)), table)] for key, table in zip(keys, tables, strict=True)}
        layouts = {(phase, name, call): Layout.of(*own) for phase, name, call, *own in told["layouts"]}
        return cls(values, layouts, facts=told["facts"], floors=dict(zip(keys, told["floors"], strict=True)))


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
