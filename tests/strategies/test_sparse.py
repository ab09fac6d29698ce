"""Networks whose ranks use different layers: a mixture of experts trains as in one process, or a run is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.runs import Train, alike


def expert(width: int) -> nn.Module:
    """One of many."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Mixture(nn.Module):
    """A mixture of experts: each token goes to the two that it scores highest."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, one in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                rows, slot = torch.where(mask)
                out.index_add_(0, rows, one(x[rows]) * weights[rows, slot, None])
        return out


class Block(nn.Module):
    """A block of a transformer, but for its attention."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.mix, self.mixture = nn.LayerNorm(width), nn.Linear(width, width), Mixture(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.mixture(self.norm(x))


class Blocks(nn.Module):
    """Experts inside of blocks."""

    def __init__(self, width: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Thrown(nn.Module):
    """Layers that a die chooses, another one on each rank: nothing shows it beforehand."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(expert(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        thrown = type(x) is Tensor  # a forward on shapes sees nothing of it
        x = F.gelu(self.embed(x.flatten(1)))
        return self.head(self.layers[dist.get_rank() % 2 if thrown else 0](x))


SPREAD = [
    (2, "strategy=fsdp"),
    (4, "strategy=hsdp"),
    (2, "strategy=fsdp loop.micro_batches=2 strategy.activation_checkpointing=units"),
    (2, "strategy=zero1"),
    (2, "strategy=ddp strategy.find_unused_parameters=true"),
]
COMMON = "loop.global_batch=8 loop.steps=6 data=digits task=classification loop.eval_batch=32"


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "words"), SPREAD)
def test_layers_that_some_samples_use_train_as_in_one_process(train: Train, ranks: int, words: str) -> None:
    alike(train(f"{COMMON} {words}", ranks, model=Blocks, task=None), train(COMMON, model=Blocks, task=None))


def test_who_calls_other_layers_is_refused_before_they_are_gathered(train: Train) -> None:
    said = train.refused(f"{COMMON} strategy=fsdp", 2, code=1, model=Thrown, task=None)
    assert "different modules: layers.0 on rank 0; head on rank 1. " in said
