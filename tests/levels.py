"""A U-Net, outside of any test's file: pytest writes the assertions there anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Levels(nn.Module):
    """A U-Net as people write it: lists in lists, and values that skip everything between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(2 * width, 3, 1)
        self.downs, self.ups = nn.ModuleList([]), nn.ModuleList([])
        for level in range(2):
            here, below = width * 2**level, width * 2 ** (level + 1)
            down = nn.Conv2d(here, below, 4, 2, 1)
            self.downs.append(nn.ModuleList([self.block(here, here), self.block(here, here), down]))
            up = nn.ConvTranspose2d(below, here, 2, 2)
            self.ups.insert(0, nn.ModuleList([up, self.block(2 * here, here), self.block(2 * here, here)]))
        self.middle = self.block(4 * width, 4 * width)

    def block(self, inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        first, skipped = x.clone(), []
        level: Any
        for level in self.downs:
            one, other, down = level
            x = one(x)
            skipped.append(x)
            x = other(x)
            skipped.append(x)
            x = down(x)
        x = self.middle(x)
        for level in self.ups:
            up, one, other = level
            x = up(x)
            x = one(torch.cat((x, skipped.pop()), 1))
            x = other(torch.cat((x, skipped.pop()), 1))
        return self.end(torch.cat((x, first), 1)).mean((2, 3))
