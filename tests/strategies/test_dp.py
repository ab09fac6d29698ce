"""DataParallel: its place in a step is proved with replicas on threads; the real one wants two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.toys import STRATEGIES, Case, run
from trainer.launch import Launch
from trainer.refusal import Refusal
from trainer.strategies.dp import DP
from trainer.tree import first_tensor, rows


class Threads(nn.Module):
    """What nn.DataParallel does, on one CPU: replicas that share their gradients, one thread each, outputs in order."""

    def __init__(self, step: nn.Module, count: int) -> None:
        super().__init__()
        self.step, self.count = step, count

    def forward(self, inputs: Any, targets: Any) -> Any:
        size = first_tensor(targets).shape[0]
        bounds = [size * part // self.count for part in range(self.count + 1)]
        parts = [(rows(inputs, a, b, size), rows(targets, a, b, size)) for a, b in pairwise(bounds)]
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


def test_without_two_gpus_it_says_so_in_one_line() -> None:
    with DP() as strategy:
        notes = strategy.notes(nn.Linear(1, 1))
    if torch.cuda.device_count() < 2:
        assert len(notes) == 1
        assert "like strategy=single" in notes[0]


def test_several_processes_are_refused_with_the_strategy_that_wants_them() -> None:
    with pytest.raises(Refusal, match="2 were started; use strategy=ddp"):
        DP().data_ranks(2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel needs two GPUs; this machine has fewer")
def test_two_gpus_give_the_curve_of_one() -> None:
    reference, dealt = run(Launch(), Case()), run(Launch(), Case("dp"))
    assert max(abs(a - b) for a, b in zip(dealt["losses"], reference["losses"], strict=True)) < 1e-3
