"""The numbers that stand for a tensor: of parts they add up to those of the whole, however it is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.verify.training_record import (
    Key,
    Phase,
    SketchRecorder,
    TrainingRecord,
    add_sketches,
    sketch_distance,
    sketch_rows,
)

SHAPES = {"matrix": (7, 5), "vector": (3,), "large": (70_000, 3)}  # over four ranks no dimension is divided evenly


def tensor(name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_stretches_of_a_row_add_up_to_it(kind: torch.dtype) -> None:
    row = torch.randn(1, 200_001, generator=torch.Generator().manual_seed(0), dtype=kind)
    row[0, 3], row[0, 150_000] = torch.inf, torch.nan
    cuts = [0, 2, 2, 65_536, 65_537, 140_000, 200_001]
    parts = [sketch_rows(row[:, begin:end], begin) for begin, end in pairwise(cuts)]
    torch.testing.assert_close(add_sketches(parts), sketch_rows(row), rtol=1e-12, atol=1e-9)
    swapped = [sketch_rows(row[:, 65_536 : 2 * 65_536], 0), sketch_rows(row[:, :65_536], 65_536), *parts[5:]]
    assert float(sketch_distance(add_sketches(swapped), sketch_rows(row))) > 1


def program(launch: Launch) -> dict[Key, Tensor]:
    """What each rank tells of tensors that are cut in every way."""
    with DDP(machine=Machine(launch=launch, device="cpu")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        line = init_device_mesh("cpu", (4,))
        record = TrainingRecord()
        signing = SketchRecorder(record)
        for name in SHAPES:
            signing.add(Key(0, Phase.UPDATE, name), distribute_tensor(tensor(name), line, [Shard(0)]))
        full = tensor("matrix")
        signing.add(Key(1, Phase.UPDATE, "columns"), distribute_tensor(full, line, [Shard(1)]))
        signing.add(Key(1, Phase.UPDATE, "copies"), distribute_tensor(full, mesh, [Replicate(), Shard(0)]))
        signing.add(Key(1, Phase.UPDATE, "both"), distribute_tensor(full, mesh, [Shard(0), Shard(1)]))
        signing.add(Key(1, Phase.UPDATE, "plain"), full)
        signing.join()
        return {key: record.table(key) for key in record.values}


def test_shards_are_signed_where_they_are(processes: Processes) -> None:
    """Of copies each rank tells one of its own; of shards each is told once among those who have them."""
    told = processes.run(4, program)
    times = {key.name: sum(key in each for each in told) for key in {key for each in told for key in each}}
    assert times == {**dict.fromkeys(SHAPES, 1), "columns": 1, "both": 1, "copies": 2, "plain": 4}
    for each in told:
        for key, table in each.items():
            wanted = sketch_rows(tensor(key.name if key.name in SHAPES else "matrix").reshape(1, -1))
            torch.testing.assert_close(table, wanted, rtol=1e-12, atol=1e-9)
