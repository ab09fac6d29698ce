"""DataParallel: its place in a step is proved with replicas on threads; the real one wants two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.run import far
from tests.strategies.networks import DrawingNet, Plain, Weighted
from tests.strategies.runs import Train, alike, name_of
from trainer import Refusal
from trainer.strategies.dp import DP


class Threads(nn.Module):
    """What nn.DataParallel does, on one CPU: replicas that share their gradients, one thread each, outputs in order."""

    def __init__(self, step: nn.Module, count: int) -> None:
        super().__init__()
        self.step, self.count = step, count

    def forward(self, inputs: Any, targets: Any) -> Any:
        size = len(inputs)
        bounds = [size * part // self.count for part in range(self.count + 1)]
        parts = [(inputs[a:b], tuple(target[a:b] for target in targets)) for a, b in pairwise(bounds)]
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


@pytest.mark.parametrize(("task", "micro_batches"), [(Plain, 1), (Weighted, 2)])
def test_replicas_in_threads_give_the_curve_of_one_device(train: Train, task: Any, micro_batches: int) -> None:
    words = f"strategy=dp strategy._target_={name_of(OnThreads)} loop.micro_batches={micro_batches}"
    alike(train(words, task=task), train(task=task))


def test_without_two_gpus_it_says_so_in_one_line() -> None:
    with DP() as strategy:
        notes = strategy.notes(nn.Linear(1, 1))
    if torch.cuda.device_count() < 2:
        assert len(notes) == 1
        assert "like strategy=single" in notes[0]


class Two(OnThreads):
    """As on a machine with two GPUs."""

    def devices(self) -> list[int]:
        return [0, 1]


def test_several_processes_and_compiled_replicas_are_refused(train: Train) -> None:
    with pytest.raises(Refusal, match="2 were started; use strategy=ddp"):
        DP().data_ranks(2)
    words = f"strategy=dp strategy._target_={name_of(Two)} compile.mode=default"
    assert "use compile.mode=null" in train.refused(words)


@pytest.mark.gpu(2)
def test_two_gpus_give_the_curve_of_one_and_repeat_their_random_numbers(train: Train) -> None:
    words = "precision=fp32 device=cuda strategy=dp"
    assert far(train(words).losses, train("precision=fp32").losses) < 1e-3
    one, again = train(words, model=DrawingNet), train(f"{words} loop.log_every=1 seed=3", model=DrawingNet)
    assert one.losses == again.losses
