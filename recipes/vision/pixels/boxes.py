"""Boxes inside images, a random one for each."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.rng import Random


def aspects(draw: Tensor, most: float) -> Tensor:
    """Width by height, from 1 / most to most, wide ones as often as high ones; draw: (B,) uniform in 0..1.

    Not the exponential of a uniform number, as papers have it: its last bits depend on the device.
    """
    turn = draw * 2 - 1
    stretch = 1 + turn.abs() * (most - 1)
    return torch.where(turn < 0, 1 / stretch, stretch)


def sides(area: Tensor, aspect: Tensor) -> tuple[Tensor, Tensor]:
    """Width and height of boxes of this area and aspect, all as parts of the image's; cut off where they reach out."""
    return (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)


def inside(images: Tensor, random: Random, wide: Tensor, high: Tensor) -> Tensor:
    """Which pixels lie in a box of these sides at a random place in each image: (B, 1, H, W)."""
    batch, _, height, width = images.shape
    right, down = random.uniform(batch, 2).unbind(1)
    x = torch.arange(width, device=images.device) + 0.5  # middles of pixels
    y = torch.arange(height, device=images.device) + 0.5
    across, along = _between(x, wide * width, right, width), _between(y, high * height, down, height)
    return (along[:, :, None] & across[:, None, :])[:, None]


def _between(middles: Tensor, length: Tensor, place: Tensor, pixels: int) -> Tensor:
    """(B, pixels): which of them lie in an interval of this length; place: where it lies, 0..1 from edge to edge."""
    start = place * (pixels - length)
    return (middles >= start[:, None]) & (middles < (start + length)[:, None])


def erase(images: Tensor, random: Random, chance: float) -> Tensor:
    """Blank a random box in some of the images: random erasing (Zhong et al. 2017).

    images: normalised, so that 0 is the mean. The box has 2 to 33 % of the area, and sides of 3:10 to 10:3.
    """
    happens, share, turn = random.uniform(images.shape[0], 3).unbind(1)
    wide, high = sides(0.02 + 0.31 * share, aspects(turn, 10 / 3))
    blank = inside(images, random, wide, high) & (happens < chance)[:, None, None, None]
    return images.masked_fill(blank, 0.0)
