"""Changes of brightness, contrast and saturation, each image by its own amounts.

A mean over an image is a sum of whole numbers here: sums of floats would depend on the order of adding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.rng import Random

_LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue seem (ITU-R BT.601)
_STEPS = 4096.0  # of a grey value, in a sum of whole numbers


def jitter(
    images: Tensor, random: Random, brightness: float, contrast: float, saturation: float, full_scale: float = 255.0
) -> Tensor:
    """Multiply each image's brightness, contrast and saturation by factors of its own, from 1 - amount to 1 + amount.

    In this order, and cut off at black and white. (B, C, H, W), uint8 or float; the result is float32.
    """
    amounts = (brightness, contrast, saturation)
    draws = (random.uniform(images.shape[0], 3) * 2 - 1).unbind(1)
    bright, strong, rich = (
        (1 + draw * amount)[:, None, None, None] for draw, amount in zip(draws, amounts, strict=True)
    )
    x = (images.float() * bright).clamp_(0, full_scale)
    x = away_from(mean(grey(x), full_scale), x, strong).clamp_(0, full_scale)
    return away_from(grey(x), x, rich).clamp_(0, full_scale)


def away_from(other: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """The image moved away from another one (factor above 1) or towards it."""
    return (x - other).mul_(factor).add_(other)


def grey(x: Tensor) -> Tensor:
    """(B, 1, H, W): how bright each pixel seems."""
    channels = x.unbind(1)
    shares = _LUMA if len(channels) == 3 else (1 / len(channels),) * len(channels)
    total = torch.zeros_like(channels[0])
    for channel, share in zip(channels, shares, strict=True):
        total = total + channel * share  # one after the other: a reduction may add in another order
    return total[:, None]


def mean(greys: Tensor, full_scale: float) -> Tensor:
    """(B, 1, 1, 1): the mean of each grey image, the same bits on every device and in every batch."""
    steps = (greys * (_STEPS / full_scale)).round_().to(torch.int64)
    pixels = greys.shape[-2] * greys.shape[-1]
    return steps.sum((1, 2, 3), keepdim=True).float() * (full_scale / _STEPS / pixels)
