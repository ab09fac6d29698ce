"""What a training of a few steps leaves to be compared: sketches of its tensors, in the order of time.

A sketch is ten numbers that stand for a tensor, or for a sample's part of one: projections on random signs and the
norm, both of what is finite, and a number that says where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
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

from trainer.data.nested_tensors import named_tensors
from trainer.data.rng import GOLDEN, mix_bits, to_int64
from trainer.parallel.context_parallel import Pieces
from trainer.parallel.ranks import Group, Ranks

_BLOCK = 2**16  # numbers that one row of signs is for
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie as evenly as can be
# One projection of a small difference may be near zero by chance. The mean square of eight is the square of its norm
# within a factor of five, but for one in a hundred thousand.
_PROJECTIONS = 8
FIRST, LENGTH, PATTERN, WIDTH = 0, 1, 2, 2 + _PROJECTIONS  # columns; the other projections follow


def sketch_rows(rows: Tensor, first: int = 0) -> Tensor:
    """The sketches of each row: (n, numbers) → (n, 10) float64 on the CPU: a projection on ±1, the 2-norm, a pattern.

    first: where in longer rows these are stretches of they begin; the other stretches' sketches are `joined` to them.

    After them seven projections more. A change of a row by a vector d moves projections and norm by about the norm of
    d, wherever in the row it is. The pattern is 0 where all numbers are finite, else a whole number that says which are
    infinite or NaN, and where.
    """
    x, first = (torch.view_as_real(rows).flatten(1), 2 * first) if rows.is_complex() else (rows, first)
    x = x.detach().to(torch.float64)
    norm = x.norm(dim=1)
    pattern = torch.zeros_like(norm)
    if not norm.isfinite().all():  # a mask of -inf: what is equal is equal, and the others have digits of their own
        # float64 adds whole numbers of this size exactly, in any order
        kinds_of_number = x.isposinf() + 2.0 * x.isneginf() + 3.0 * x.isnan()
        pattern = (kinds_of_number * (mix_bits(torch.arange(x.shape[1]) + first + 1) & 0xFFFFF).to(x)).sum(1)
        x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        norm = x.norm(dim=1)
    # in blocks, so that the table of signs stays small whatever the length of a row
    signs, projections = _random_signs(x.device), x.new_zeros(len(x), _PROJECTIONS)
    for begin in range(first - first % _BLOCK, first + x.shape[1], _BLOCK):
        block = x[:, max(0, begin - first) : begin + _BLOCK - first]
        of_block = signs[max(0, first - begin) :][: block.shape[1]]
        # no two blocks weigh the same, or they could be exchanged unseen
        projections += (block @ of_block) * (1 + begin // _BLOCK * _GOLDEN % 1)
    columns = [projections[:, :1], norm[:, None], pattern[:, None], projections[:, 1:]]
    return torch.cat(columns, dim=1).cpu()


def sketch_distance(first: Tensor, second: Tensor) -> Tensor:
    """How far rows lie apart, by their sketches: (n, 10), (n, 10) → (n,): about the norm of the difference."""
    change = (first - second).abs()
    projections = torch.cat([change[:, :LENGTH], change[:, PATTERN + 1 :]], dim=1)
    return torch.maximum(projections.square().mean(1).sqrt(), change[:, LENGTH])


def add_sketches(parts: Sequence[Tensor]) -> Tensor:
    """The sketches of what these are the sketches of parts of, each with zeros in the place of the others."""
    stacked = torch.stack([*parts])
    sums = stacked.sum(0)
    sums[:, LENGTH] = stacked[:, :, LENGTH].norm(dim=0)
    return sums


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective where ranks hold shards of it: all of a tensor. It is no layout that torch calculates with lazily."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # the ranks of its mesh; its shards to all
    return full.detach().to_dense() if full.layout != torch.strided else full.detach()


@cache
def _random_signs(device: torch.device) -> Tensor:
    words = mix_bits(torch.arange(1, _BLOCK + 1) * to_int64(GOLDEN))
    bits = words[:, None] >> torch.arange(_PROJECTIONS)  # (block, projections)
    return ((bits & 1) * 2 - 1).to(device, torch.float64)


class SampleLayout(NamedTuple):
    """Where the samples of a batch lie in a tensor."""

    dim: int  # their dimension; -1: there is none, the tensor is the same for every batch
    each: int = 1  # entries of that dimension for a sample: windows of an image, words of a text
    outer: bool = True  # the entries of a sample stand together; else those of all samples alternate
    size: int = 0  # numbers of a sample; 0: it may have any number of them
    local: bool = False  # whole numbers that count from where a sample begins in the batch: the nodes of a graph
    shape: Sequence[int] = ()  # of the tensor; 0 where the samples are

    def rows(self, x: Tensor, samples: int) -> Tensor | None:
        """(samples, size): a row for each sample; None where the tensor has another shape than it must have then."""
        if self.dim < 0:
            return x.reshape(1, -1) if x.numel() == self.size or not self.size else None
        if x.dim() <= self.dim or x.shape[self.dim] != samples * self.each or x.numel() != samples * self.size:
            return None
        x = x.movedim(self.dim, 0)
        x = x.unflatten(0, (samples, self.each) if self.outer else (self.each, samples))
        x = (x if self.outer else x.transpose(0, 1)).flatten(1)
        return x.to(torch.float64) - x[:, :1] if self.local else x

    def pad_pieces(self, x: Tensor, samples: int, pieces: Pieces, tokens: int) -> Tensor | None:
        """All of a tensor of which `x` is these pieces of the sequences, with zeros in the place of the others.

        tokens: of the whole sequences. None where it is no such tensor.
        """
        if x.dim() != len(self.shape):
            return None
        shape = [samples * self.each if dim == self.dim else size for dim, size in enumerate(self.shape)]
        (dim, *others) = [dim for dim in range(x.dim()) if x.shape[dim] != shape[dim]] or [-1]
        size, parts = tokens // pieces.of, len(pieces.numbers)
        if dim < 0 or others or shape[dim] != tokens or x.shape[dim] != size * parts:
            return None
        padded = x.new_zeros(shape)
        for number, piece in zip(pieces.numbers, x.split(size, dim), strict=True):
            padded.narrow(dim, number * size, size).copy_(piece)
        return padded


class Phase:
    """The phases of a step, in the order of time; the words stand in messages and in verify.json."""

    INITIAL, DATA, FORWARD, LOSS, GRADIENT = "initial values", "data", "forward", "loss", "gradient"
    NORM, RATE, CLIPPED, STEP = "norm", "learning rate", "clipped gradient", "optimizer step"
    UPDATE, RESUME, EVALUATION = "update", "resume", "evaluation"


class Key(NamedTuple):
    """What a sketch is of."""

    step: int  # from 1 on; 0: before the first
    phase: str
    name: str  # of a module, a parameter, a part of the loss
    call: int = 0  # of a module in one forward

    def __str__(self) -> str:
        call = f" (call {self.call + 1})" if self.call else ""
        where = f"step {self.step}, " if self.step else ""
        return f"{where}{self.phase}, {self.name or 'the output of the network'}{call}"


@dataclass
class TrainingRecord:
    """Signatures by what they are of; the keys stand in the order of time."""

    values: dict[Key, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)  # rows, their sketches
    # phase, name, call → where samples lie
    layouts: dict[tuple[str, str, int], SampleLayout] = field(default_factory=dict)
    # as `values`, of tensors of which a rank has only a part: pieces of sequences
    parts: dict[Key, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what it is a record of
    floors: dict[Key, float] = field(default_factory=dict)  # how far rounding alone takes it, relative to its norm

    phases: Collection[str] | None = None  # of which somebody will ask; None: of all

    def wants(self, phase: str) -> bool:
        """Will somebody ask for it?"""
        return self.phases is None or phase in self.phases

    def note_width(self, module: str, tree: Any) -> None:
        """Keep the bytes of the widest numbers that a module has given: autocast decides them, rounding does not."""
        widths = self.facts.setdefault("widths", {})
        for _, x in named_tensors(tree, module):
            if x.dtype.is_floating_point:
                widths[module] = max(x.dtype.itemsize, widths.get(module, 0))

    def add(self, key: Key, rows: Sequence[int], sketches: Tensor) -> None:
        """Keep the sketches of these rows: samples of the global batch, or 0 of what is one thing."""
        self.values.setdefault(key, []).append((rows, sketches))

    def join(self, ranks: Ranks) -> None:
        """Collective: what these ranks have parts of becomes whole on each of them, where all of them have one."""
        all_parts = ranks.all_gather_values(self.parts)  # these ranks; a few numbers for each sample and module
        for key, mine in self.parts.items():
            others = [other.get(key, []) for other in all_parts]
            if all([rows for rows, _ in other] == [rows for rows, _ in mine] for other in others):
                for at, (rows, _) in enumerate(mine):
                    self.add(key, rows, add_sketches([other[at][1] for other in others]))
        self.parts = {}

    def table(self, key: Key, min_rows: int = 0) -> Tensor:
        """(rows, 10): the sketches of all rows of a key, so many at least; zeros where one has no such thing."""
        rows = torch.tensor([row for part, _ in self.values[key] for row in part])
        table = torch.zeros(max(min_rows, 1 + int(rows.max())), WIDTH, dtype=torch.float64)
        table[rows] = torch.cat([sketches for _, sketches in self.values[key]])
        return table

    def rows(self, key: Key, rows: Sequence[int]) -> Tensor:
        """(len(rows), 10): the sketches of these rows of a key; zeros where one has no such thing."""
        min_rows = 1 + max(rows, default=0)
        (numbers, sketches), *others = self.values[key]
        # as a rule one process has all of it, in order
        complete = not others and [*numbers] == [*range(max(min_rows, len(sketches)))]
        table = sketches if complete else self.table(key, min_rows)
        return table if len(rows) == len(table) == 1 else table[list(rows)]

    def norms(self, keys: Sequence[Key]) -> list[float]:
        """The largest norm of each of these keys: all at once, for they are thousands."""
        sizes = [sum(len(rows) for rows, _ in self.values[key]) for key in keys]
        lengths = torch.cat([sketches[:, LENGTH] for key in keys for _, sketches in self.values[key]]).tolist()
        ends = [*accumulate(sizes, initial=0)]
        return [max(lengths[begin:end], default=0.0) for begin, end in pairwise(ends)]

    def write(self, path: Path) -> None:
        """Write a whole record to a file of safetensors."""
        tables = [self.table(key) for key in self.values]
        layouts = [[*key, *layout] for key, layout in self.layouts.items()]
        floors = [self.floors.get(key, 0.0) for key in self.values]
        metadata = {"keys": [*self.values], "layouts": layouts, "facts": self.facts, "floors": floors}
        metadata["rows"] = [len(table) for table in tables]  # one tensor of all: thousands take long to write and read
        path.unlink(missing_ok=True)  # it may be a link
        # safetensors keeps texts beside tensors
        texts = {name: json.dumps(value) for name, value in metadata.items()}
        save_file({"signatures": torch.cat(tables)}, path, texts)

    @classmethod
    def read(cls, path: Path) -> TrainingRecord:
        """What `write` has written."""
        with safe_open(path, "pt") as file:
            metadata = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            keys = [Key(*key) for key in metadata["keys"]]
            tables = file.get_tensor("signatures").split(metadata["rows"])
        values: dict[Key, list[tuple[Sequence[int], Tensor]]]
        values = {key: [(range(len(table)), table)] for key, table in zip(keys, tables, strict=True)}
        layouts = {(phase, name, call): SampleLayout(*fields) for phase, name, call, *fields in metadata["layouts"]}
        return cls(values, layouts, facts=metadata["facts"], floors=dict(zip(keys, metadata["floors"], strict=True)))


class SketchRecorder:
    """Sketches tensors as they come. Sharded tensors are in the record once all of their ranks have called `join`."""

    def __init__(self, record: TrainingRecord) -> None:
        self._record = record
        self._shards: dict[ProcessGroup, dict[Key, Tensor]] = {}  # who holds shards of it → sketches of this rank's

    def add(self, key: Key, tensor: Tensor) -> None:
        """Sketch a tensor, if somebody will ask for it. Collective where several mesh dimensions shard it."""
        if not self._record.wants(key.phase):
            return
        dims = _sharded_dims(tensor) if isinstance(tensor, DTensor) else []
        if isinstance(tensor, DTensor) and len(dims) == 1 and type(tensor.placements[dims[0]]) is Shard:
            # ten numbers of each shard will travel, not the tensor
            group = tensor.device_mesh.get_group(dims[0])
            self._shards.setdefault(group, {})[key] = _sketch_shard(tensor, dims[0])
            return
        full = full_tensor(tensor)
        if _is_reporter(tensor, key):
            self._record.add(key, [0], sketch_rows(full.reshape(1, -1)))

    def join(self) -> None:
        """Collective: add up the sketches of shards; each sum is told by one of those who have a part of it."""
        for group, parts in self._shards.items():
            ranks = Group(group)
            mine = tuple(parts), torch.cat([*parts.values()])
            every = ranks.all_gather_values(mine)  # who holds the shards; ten numbers for each tensor
            tables = [dict(zip(keys, table.split(1), strict=True)) for keys, table in every]
            for key in parts:
                # a sum without the part of one rank is not that of the whole tensor
                if _reporter_rank(key, ranks.size) == ranks.rank and all(key in table for table in tables):
                    self._record.add(key, [0], add_sketches([table[key] for table in tables]))
        self._shards = {}


def _sharded_dims(tensor: DTensor) -> list[int]:
    """The dimensions of its mesh along which it is no copy. Each copy is recorded by itself: they may differ."""
    return [at for at, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def _sketch_shard(tensor: DTensor, at: int) -> Tensor:
    """The sketch of this rank's shard, with zeros in the place of the others. at: the dimension of the mesh."""
    dim, shard = tensor.placements[at].dim, tensor.to_local().detach()  # type: ignore[attr-defined]
    size, mesh = tensor.shape[dim], tensor.device_mesh
    start = min(size, -(-size // mesh.size(at)) * mesh.get_local_rank(at))  # as torch.chunk cuts
    if dim == 0:  # one stretch of its numbers
        return sketch_rows(shard.reshape(1, shard.numel()), start * tensor.shape[1:].numel())
    full = shard.new_zeros(tensor.shape)
    full.narrow(dim, start, shard.shape[dim]).copy_(shard)
    return sketch_rows(full.reshape(1, -1))


def _is_reporter(tensor: Tensor, key: Key) -> bool:
    """Does this rank record it? What ranks gather from their shards is the same on all of them, so one is enough."""
    if not isinstance(tensor, DTensor):
        return True
    index, count = 0, 1  # of this rank among those that hold shards
    for dim in _sharded_dims(tensor):
        size = tensor.device_mesh.size(dim)
        index, count = index * size + tensor.device_mesh.get_local_rank(dim), count * size
    return _reporter_rank(key, count) == index


def _reporter_rank(key: Key, ranks: int) -> int:
    return crc32(key.name.encode()) % ranks  # another rank for each name: none has all the work
