"""The product's own networks under the strategies that change most about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.vision.classification import Classification
from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import STRATEGIES, built
from trainer import Data
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.strategies.machine import Machine


class Pictures:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 3, 16, 16, generator=generator)
        self.y = torch.randint(0, 10, (64,), generator=generator)

    def __len__(self) -> int:
        return 64

    def batch(self, indices: Tensor) -> Any:
        return self.x[indices], self.y[indices]

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def own_transformer() -> nn.Module:
    return VisionTransformer(num_classes=10, channels=3, image_size=16, patch_size=4, width=48, depth=2, heads=12)


def torchvisions_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer as Theirs

    network = Theirs(16, 4, 2, 2, 32, 64, num_classes=10)
    nn.init.normal_(network.heads.head.weight, std=0.02)  # theirs starts at zero, where nothing flows back
    return network


def small_resnet() -> nn.Module:
    return resnet18(num_classes=10, channels=3, image_size=16)


def losses(
    launch: Launch, make: Any, strategy: str, fields: dict[str, Any], precision: str, steps: int, slices: int = 1
) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    machine = Machine(launch=launch, device="cpu", precision=precision)
    chosen = STRATEGIES[strategy](machine=machine, **fields)
    network, task, data = built(chosen, make), Classification(), Data()
    chosen.check(task, network, launch.world_size)
    with chosen:
        stream = TrainLoader(data, Pictures(), chosen.slice, 16, slices, LoaderOptions())
        parallel_model = chosen.build(task, network, stream.example())
        optimizer = parallel_model.optimizer(
            lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, fused=True),
            [{"params": list(parallel_model.network.parameters())}],
        )
        seen, norms, step = [], [], 0
        while step < steps:
            for batches in stream.epoch(step // stream.steps_per_epoch):
                parts = parallel_model.forward_backward(batches, step)
                norms.append(float(parallel_model.optimizer_step(optimizer, 1.0)))
                seen.append(float(chosen.totals(parts).read()["loss"]))
                step += 1
                if step == steps:
                    break
    return seen, norms


@pytest.mark.parametrize("make", quickly([own_transformer, torchvisions_transformer], own_transformer))
@pytest.mark.parametrize(
    ("size", "strategy", "fields"),
    [
        (2, "tp", {}),
        pytest.param(4, "ddp_tp", {"tensor": 2}, marks=pytest.mark.long),
        pytest.param(2, "zero1", {}, marks=pytest.mark.long),
        pytest.param(2, "pp", {"schedule": "GPipe"}, marks=pytest.mark.long),
        pytest.param(4, "fsdp", {"tensor": 2, "activation_checkpointing": "operators"}, marks=pytest.mark.long),
        (4, "mesh", {"pipe": 2, "tensor": 2, "activation_checkpointing": "units"}),
    ],
)
def test_transformers_are_cut_exactly(
    processes: Processes, make: Any, size: int, strategy: str, fields: dict[str, Any]
) -> None:
    (reference,) = processes.run(1, losses, make, "single", {}, "fp64", 8)
    for rank in processes.run(size, losses, make, strategy, fields, "fp64", 8):
        for own, theirs in zip(rank, reference, strict=True):
            assert max(abs(a - b) for a, b in zip(own, theirs, strict=True)) < 1e-10


@pytest.fixture(scope="module")
def alone(processes: Processes) -> list[float]:
    """The losses of the residual network on one process."""
    (reference,) = processes.run(1, losses, small_resnet, "single", {}, "fp32", 4)
    return reference[0]


@pytest.mark.parametrize("strategy", quickly(["ddp", "zero1", "fsdp"]))
def test_a_residual_network_with_synchronised_statistics_learns_the_curve_of_one_process(
    processes: Processes, alone: list[float], strategy: str
) -> None:
    for rank in processes.run(2, losses, small_resnet, strategy, {"sync_bn": True}, "fp32", 4):
        assert max(abs(a - b) for a, b in zip(rank[0], alone, strict=True)) < 1e-3
