"""Clipping to a global norm: what torch's own clipping does on one process."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.processes import Processes
from tests.strategies.toys import BATCH, Net, Plain, ToyData
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.parallel.gradient_clipping import global_norm
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.single import Single


@pytest.mark.parametrize("part", [0.1, 0.999, 1.001, 10.0])
def test_gradients_above_the_limit_are_scaled_to_it_and_those_below_stay(part: float) -> None:
    torch.manual_seed(0)
    with Single(machine=Machine(device="cpu")) as strategy:
        data = ToyData()
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, 2, LoaderOptions())
        parallel_model = strategy.build(Plain(), Net(), stream.example())
        optimizer = torch.optim.SGD(parallel_model.network.parameters(), lr=1.0)
        parallel_model.forward_backward(next(iter(stream.epoch(0))), 0)
        reference = deepcopy(parallel_model.network)
        for own, other in zip(parallel_model.network.parameters(), reference.parameters(), strict=True):
            other.grad = own.grad.clone()
        limit = part * float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
        norm = parallel_model.optimizer_step(optimizer, limit)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for own, other in zip(parallel_model.network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
        assert own.grad is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_norm_of_millions_of_numbers_is_as_exact_as_its_dtype(layout: torch.memory_format) -> None:
    """torch adds up the squares of a whole tensor on a CPU in one chain: five million of them lose three digits."""
    gradient = torch.randn(1000, 50, 10, 10).to(memory_format=layout)
    torch.testing.assert_close(global_norm([gradient]).double(), gradient.double().norm(), rtol=2e-7, atol=0)
    halves = [torch.randn(3, 5), gradient[:500], gradient[500:]]
    torch.testing.assert_close(
        global_norm(halves).double(), torch.cat([half.double().flatten() for half in halves]).norm(), rtol=2e-7, atol=0
    )


def norms(launch: Launch, draws: list[list[float]]) -> list[float]:
    """The norm of each draw, of which a rank holds one number."""
    with FSDP(machine=Machine(launch=launch, device="cpu")) as strategy:
        own = [torch.tensor([draw[launch.rank]]) for draw in draws]
        return [float(global_norm([DTensor.from_local(x, strategy.mesh["shard"], [Shard(0)])])) for x in own]


def test_shards_are_added_in_rank_order_so_that_every_copy_of_the_network_has_the_same_bits(
    processes: Processes,
) -> None:
    draws = torch.randn(200, 4)
    wanted = [float(draw.square().sum().sqrt()) for draw in draws]
    assert processes.run(4, norms, draws.tolist()) == [wanted] * 4
