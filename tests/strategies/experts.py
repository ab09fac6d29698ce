"""Networks that use some of their layers only where their data want them, as people write them."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import Plan


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
    """Experts inside of blocks; the plan may name each of them, which cannot be units."""

    def __init__(self, num_classes: int = 10, width: int = 16, experts: int = 8, named: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(2))
        self.head = nn.Linear(width, num_classes)
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def plan(self) -> Plan:
        return Plan(shard=("blocks.*.mixture.experts.*",)) if self.named else Plan()


class Flat(nn.Module):
    """Experts in the network itself, of which each sample takes one, by a mask."""

    def __init__(self, num_classes: int = 10, width: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(64, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(expert(width) for _ in range(experts))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            mask = chosen == number
            out[mask] = self.experts[number](x[mask]) * weight[mask].unsqueeze(-1)
        return self.head(x + out)


class Thrown(nn.Module):
    """Layers that a die chooses, another one on each rank after some forwards: nothing shows it beforehand."""

    def __init__(self, num_classes: int = 10, width: int = 16, forwards: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, num_classes)
        self.layers = nn.ModuleList(expert(width) for _ in range(2))
        self.left = forwards

    def forward(self, x: Tensor) -> Tensor:
        thrown = type(x) is Tensor and self.left < 1  # a forward on shapes sees nothing of it
        self.left -= self.training
        x = F.gelu(self.embed(x.flatten(1)))
        return self.head(self.layers[dist.get_rank() % 2 if thrown else 0](x))


class Dropped(nn.Module):
    """Layers that all ranks leave out together, at random."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, num_classes)
        self.layers = nn.ModuleList(expert(width) for _ in range(4))
        self.dice = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for layer in self.layers:
            if not self.training or self.dice.random() < 0.7:
                x = x + layer(x)
        return self.head(x)


class Windows(nn.Module):
    """An evaluation goes over a picture in as many windows as it needs: other ranks call the layers less often."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, num_classes)
        self.layers = nn.ModuleList(expert(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))  # (B, width)
        windows = 1 if self.training or not dist.is_initialized() else 2 + dist.get_rank()
        return torch.stack([self._window(x) for _ in range(windows)]).mean(0)

    def _window(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
