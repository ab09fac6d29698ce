"""DataParallel: its place in a step is proved with replicas on threads; the real one wants two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.toys import STRATEGIES, Case, run
from trainer.data.nested_tensors import first_tensor, slice_rows
from trainer.launch.rendezvous import Launch
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.parallel.compile import CompileSettings
from trainer.strategies.dp import DP, Replicas
from trainer.strategies.machine import Machine


class Threads(nn.Module):
    """What nn.DataParallel does, on one CPU: replicas that share their gradients, one thread each, outputs in order."""

    def __init__(self, step: nn.Module, count: int) -> None:
        super().__init__()
        self.step, self.count = step, count

    def forward(self, inputs: Any, targets: Any) -> Any:
        size = first_tensor(targets).shape[0]
        bounds = [size * part // self.count for part in range(self.count + 1)]
        parts = [(slice_rows(inputs, a, b, size), slice_rows(targets, a, b, size)) for a, b in pairwise(bounds)]
        replicas = [_replica(self.step) for _ in parts]
        with ThreadPoolExecutor(self.count) as pool:
            return torch.cat(list(pool.map(lambda replica, part: replica(*part), replicas, parts)))


def _replica(module: nn.Module) -> nn.Module:
    copy = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(copy, name, _replica(child) if child is not None else None)
    for name, parameter in module._parameters.items():
        setattr(copy, name, parameter.view_as(parameter) if parameter is not None else None)
    for name, buffer in module._buffers.items():
        setattr(copy, name, buffer)
    return copy


class OnThreads(DP):
    def replicas(self, step: nn.Module) -> Callable[[Any, Any], Any]:
        return Threads(step, 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("task", ["plain", "weighted"])
def test_replicas_in_threads_give_the_curve_of_one_device(
    monkeypatch: pytest.MonkeyPatch, task: str, micro_batches: int
) -> None:
    monkeypatch.setitem(STRATEGIES, "threads", OnThreads)
    case = Case(precision="fp64", task=task)
    reference = run(Launch(), case)
    dealt = run(Launch(), case.but(strategy="threads", micro_batches=micro_batches))
    assert max(abs(a - b) for a, b in zip(dealt["losses"], reference["losses"], strict=True)) < 1e-10
    assert max(abs(a - b) for a, b in zip(dealt["norms"], reference["norms"], strict=True)) < 1e-10
    assert dealt["names"] == reference["names"]
    assert dealt["figures"] == pytest.approx(reference["figures"], abs=1e-9)


@dataclass
class Some:
    """A batch, or an output."""

    x: torch.Tensor
    more: dict[str, torch.Tensor]


def test_trees_of_every_kind_are_dealt_out_and_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(self: Any, inputs: Any, kwargs: Any, devices: Any) -> Any:
        return [([part[at] for part in (x.chunk(2) for x in inputs[0])],) for at in range(2)], ({}, {})

    # what torch does with lists of tensors, on devices that are not there
    monkeypatch.setattr(nn.DataParallel, "scatter", chunks)
    monkeypatch.setattr(nn.DataParallel, "gather", lambda self, lists, _: [torch.cat(x) for x in zip(*lists)])  # noqa: B905
    replicas, whole = Replicas(nn.Identity()), Some(torch.arange(6), {"y": torch.arange(6) * 2})
    parts, _ = replicas.scatter((whole, torch.ones(6), {"carried": torch.arange(6)}, None), {}, [0, 1])
    assert [
        (batch.x.tolist(), batch.more["y"].tolist(), len(target), memory["carried"].tolist(), nothing)
        for batch, target, memory, nothing in parts
    ] == [
        ([0, 1, 2], [0, 2, 4], 3, [0, 1, 2], None),
        ([3, 4, 5], [6, 8, 10], 3, [3, 4, 5], None),
    ]
    again = replicas.gather([batch for batch, *_ in parts], 0)
    assert (again.x.tolist(), again.more["y"].tolist()) == (whole.x.tolist(), whole.more["y"].tolist())


def test_without_two_gpus_it_says_so_in_one_line() -> None:
    with DP() as strategy:
        notes = strategy.notes(nn.Linear(1, 1))
    if torch.cuda.device_count() < 2:
        assert len(notes) == 1
        assert "like strategy=single" in notes[0]


def test_several_processes_are_refused_with_the_strategy_that_wants_them() -> None:
    with pytest.raises(Refusal, match="2 were started; use strategy=ddp"):
        DP().data_ranks(2)


def test_compiled_replicas_would_compute_with_the_first_ones_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Linear(2, 2)
    network.compile(backend="eager")
    replica = _replica(network)
    replica.weight = torch.zeros(2, 2)  # as on another GPU
    assert torch.equal(replica(torch.ones(1, 2)), network(torch.ones(1, 2)))  # hence the refusal
    compiling = DP(machine=Machine(compile=CompileSettings()))
    for count in (1, 2):
        monkeypatch.setattr(DP, "devices", lambda self, count=count: list(range(count)))
        with (
            pytest.raises(Refusal, match=r"compile.mode=default.*use compile.mode=null") if count > 1 else nullcontext()
        ):
            compiling.check(Task(), network, 1)


def test_every_gpu_draws_its_own_numbers_and_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(DP, "devices", lambda self: [0, 1, 2])
    drawn = []

    class Drawing(OnThreads):
        def replicas(self, step: nn.Module) -> Callable[[Any, Any], Any]:
            def forward(*batch: Any) -> Any:
                drawn.append([generator.initial_seed() for generator in generators[1:]])
                return step(*batch)

            return forward

    monkeypatch.setitem(STRATEGIES, "drawing", Drawing)
    for _ in range(2):
        run(Launch(), Case("drawing", micro_batches=2, steps=2))
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:]
    training = drawn[:4]  # two steps of two micro-batches
    assert len({seed for seeds in training for seed in seeds}) == 8


@pytest.mark.gpu(2)
def test_two_gpus_repeat_their_random_numbers() -> None:
    one, again = (run(Launch(), Case("dp", network="dropout", device="cuda")) for _ in range(2))
    assert one["losses"] == again["losses"]


@pytest.mark.gpu(2)
def test_two_gpus_give_the_curve_of_one() -> None:
    reference, dealt = run(Launch(), Case()), run(Launch(), Case("dp", device="cuda"))
    assert max(abs(a - b) for a, b in zip(dealt["losses"], reference["losses"], strict=True)) < 1e-3
