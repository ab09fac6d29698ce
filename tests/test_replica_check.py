"""A copy of the network that drifts is noticed, named, and never committed; copies that agree are left alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import STRATEGIES, Net, Plain, ToyData, built
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.parallel.device_mesh import to_local
from trainer.parallel.tensor_statistics import bit_sums
from trainer.strategies.machine import Machine
from trainer.strategies.replica_check import ReplicaDriftError

# In step 5 rank 1 changes one weight.
LAB = """
from torch import distributed
from recipes.vision.classification import Classification


class Drifting(Classification):
    def after_step(self, network, step):
        if step == 5 and distributed.get_rank() == 1:
            network[3].weight[0, 3] += 0.5
"""
WORDS = ("--config-dir", "drifting/conf", "task=drifting", "strategy=ddp", "model=mlp", "model.width=16")
LENGTH = ("loop.steps=12", "loop.global_batch=16", "loop.eval_every=null", "loop.save_every=4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it; each run has a folder of its own there."""
    place = tmp_path_factory.mktemp("drift")
    (place / "drifting" / "conf" / "task").mkdir(parents=True)
    (place / "drifting" / "lab.py").write_text(LAB)
    (place / "drifting" / "conf" / "task" / "drifting.yaml").write_text("_target_: drifting.lab.Drifting\n")
    return place


def ended(launch: Launch, place: Path, words: list[str]) -> str:
    """What a run ended with: its exit code, or what it said."""
    sys.path.insert(0, str(place))
    try:
        return str(product(launch, place, words))
    except ReplicaDriftError as error:
        return str(error)
    finally:
        sys.path.remove(str(place))


def test_a_copy_that_drifts_ends_the_run_before_it_is_saved(processes: Processes, place: Path) -> None:
    # found by a line, or by the next save where there is no line before it
    for log_every, found in (("2", 6), ("null", 8)):
        run = place / f"every-{log_every}"
        said = processes.run(2, ended, place, [*WORDS, *LENGTH, f"loop.log_every={log_every}", f"run.dir={run}"])
        assert said[0] == said[1]
        assert said[0].startswith(
            f"step {found}: the copies of the network have drifted apart: ranks 0, 1 hold different numbers (and nobody"
            " can say who is right) in 3.weight."
        )
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    # who wants it so says so
    words = [*WORDS, *LENGTH, "distributed.compare_copies=false", f"run.dir={place / 'so'}"]
    assert processes.run(2, ended, place, words) == ["0", "0"]


# strategy, its fields, ranks, the rank that changes a weight of its own, the tensor, and who is said to differ
SPREAD = {
    "ddp": ({}, 3, 2, "up.bias", "rank 2 on HOST holds other numbers than ranks 0, 1"),
    "zero1": ({}, 3, 0, "head.weight", "rank 0 on HOST holds other numbers than ranks 1, 2"),
    "fsdp": ({"replicate": 2}, 4, 3, "up.weight", "ranks 1, 3 hold different numbers"),
    "ddp_tp": ({"tensor": 2}, 4, 2, "up.weight", "ranks 0, 2 hold different numbers"),
    "tp": ({}, 3, 1, "norm.weight", "rank 1 on HOST holds other numbers than ranks 0, 2"),
    "pp": ({"pipe": 2, "replicate": 2}, 4, 1, "up.weight", "ranks 0, 1 hold different numbers"),
    "mesh": ({"shard": 2, "tensor": 2}, 4, 1, "norm.bias", "ranks 0, 1 hold different numbers"),
}


def drift(launch: Launch, name: str, fields: dict[str, Any], wrong: int, tensor: str, when: str) -> str:
    """A step of a toy on this rank; then one changes a number of its own, and all compare."""
    torch.manual_seed(3)
    strategy, data = STRATEGIES[name](machine=Machine(launch=launch, device="cpu"), **fields), ToyData()
    network = built(strategy, Net)
    with strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, 48, 2, LoaderOptions())
        parallel_model = strategy.build(Plain(), network, stream.example())
        optimizer = parallel_model.optimizer(torch.optim.AdamW, [{"params": list(parallel_model.network.parameters())}])
        copies = strategy.copies(parallel_model.network)
        parallel_model.forward_backward(next(stream.epoch(0)), 0)
        parallel_model.optimizer_step(optimizer, 1.0)
        copies.start(1)
        copies.check()
        if launch.rank == wrong:
            with torch.no_grad():
                to_local(dict(parallel_model.network.named_parameters())[tensor]).view(-1)[0] += 2**-20
        try:
            if when == "line":
                copies.start(2)
                copies.check()
            else:
                copies.check_before_save(2, parallel_model.state(optimizer))
        except ReplicaDriftError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.parametrize("when", ["line", pytest.param("save", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", quickly(SPREAD, "zero1", "ddp_tp"))
def test_of_copies_wherever_they_are_the_one_that_differs_is_named(processes: Processes, name: str, when: str) -> None:
    fields, ranks, wrong, tensor, who = SPREAD[name]
    for said in processes.run(ranks, drift, name, fields, wrong, tensor, when):
        words = said.splitlines()[0]
        assert "step 2:" in words, words
        assert who.split("HOST")[0] in words, words
        assert who.split("HOST")[-1] in words, words
        assert f"in {tensor}" in words, words


def buffers_said(launch: Launch, name: str) -> list[list[str]]:
    """What is said before saves of a network with a buffer that differs between ranks, and one that does not."""
    torch.manual_seed(3)
    strategy, data, made = STRATEGIES[name](machine=Machine(launch=launch, device="cpu")), ToyData(), Net()
    made.register_buffer("table", torch.ones(3))
    made.register_buffer("centre", torch.zeros(3))
    network = built(strategy, lambda: made)
    with strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, 48, 2, LoaderOptions())
        parallel_model = strategy.build(Plain(), network, stream.example())
        optimizer = parallel_model.optimizer(torch.optim.AdamW, [{"params": list(parallel_model.network.parameters())}])
        copies = strategy.copies(parallel_model.network)
        dict(parallel_model.network.named_buffers())["centre"] += launch.rank
        return [copies.check_before_save(step, parallel_model.state(optimizer)) for step in (1, 2)]


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_buffer_that_differs_is_named_once(processes: Processes, name: str) -> None:
    for (first,), later in processes.run(2, buffers_said, name):
        assert first.startswith("ranks hold different numbers in centre, as each has seen other samples")
        assert later == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_one_bit_changes_the_sum_however_a_tensor_lies(dtype: torch.dtype) -> None:
    x = torch.arange(48.0).view(2, 3, 2, 4).to(dtype)
    lies = {"plain": x, "last": x.contiguous(memory_format=torch.channels_last), "turned": x.transpose(0, 3)}
    sums = {int(one) for one in bit_sums(lies).values()}
    assert len(sums) == 1
    x[1, 2, 1, 3] = x[1, 2, 1, 3] == 0
    assert int(bit_sums({"": x})[""]) not in sums
