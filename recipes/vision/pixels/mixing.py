"""Mixup and cutmix: each image with a partner, and targets that say how much of each."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from recipes.vision.pixels.boxes import inside
from trainer.data.rng import Random

_CELLS = 1024  # of the table of quantiles
_FINE = 1 << 16  # steps of the integral that gives them


def mix(
    images: Tensor,
    targets: Tensor,
    others: Tensor,
    other_targets: Tensor,
    random: Random,
    mixup: float,
    cutmix: float,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """Mix images (B, C, H, W) of floats with others; the targets become shares of classes (B, classes).

    mixup (Zhang et al. 2017) and cutmix (Yun et al. 2019): their alphas, 0: off. A sample's own share is drawn from
    Beta(alpha, alpha). Where both are on, each sample takes one of them, as often the one as the other.
    """
    batch, _, height, width = images.shape
    which = random.uniform(batch) < (0.5 if mixup and cutmix else float(cutmix > 0))
    own = torch.where(which, beta(random, cutmix or 1.0, batch), beta(random, mixup or 1.0, batch))  # (B,)
    side = (1 - own).sqrt()  # of a box with the shape of the image, in which the other one shows
    box = inside(images, random, side, side)  # (B, 1, H, W)
    # the box holds whole pixels: what it really covers is what the targets say
    covered = box.sum((1, 2, 3)).float() / (height * width)
    own = torch.where(which, 1 - covered, own)

    # how much of the own image each pixel shows: all or nothing, or the same everywhere
    share = torch.where(which[:, None, None, None], (~box).float(), own[:, None, None, None])
    mixed = images * share + others * (1 - share)
    soft, other_soft = shares(targets, classes), shares(other_targets, classes)
    return mixed, soft * own[:, None] + other_soft * (1 - own)[:, None]


def shares(targets: Tensor, classes: int) -> Tensor:
    """Class numbers (B,) as shares (B, classes) of float32; shares stay as they are."""
    if targets.dim() > 1:
        return targets
    return (targets[:, None] == torch.arange(classes, device=targets.device)).float()


def beta(random: Random, alpha: float, batch: int) -> Tensor:
    """Float32 numbers of Beta(alpha, alpha), (B,), the same bits on every device: a table with linear interpolation."""
    draw, side = random.uniform(batch, 2).unbind(1)
    place = draw * _CELLS
    cell = place.floor()
    table = _quantiles(alpha, draw.device)
    near, far = table[cell.long()], table[cell.long() + 1]
    lower = near + (far - near) * (place - cell)  # 0..1/2; the distribution is symmetric
    return torch.where(side < 0.5, lower, 1 - lower)


@cache
def _quantiles(alpha: float, device: torch.device) -> Tensor:
    """The quantiles of the lower half of Beta(alpha, alpha) at 0, 1 / 1024, … 1 of that half."""
    with torch.inference_mode(False):
        # Over v = x^alpha the density is (1 - x)^(alpha - 1), which is finite also where that over x is not, at 0.
        v = torch.linspace(0, 0.5**alpha, _FINE + 1, dtype=torch.float64)
        area = torch.cumulative_trapezoid((1 - v ** (1 / alpha)) ** (alpha - 1), v)
        area = torch.cat((area.new_zeros(1), area)) / area[-1]
        wanted = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64)
        after = torch.searchsorted(area, wanted).clamp(1, _FINE)
        part = (wanted - area[after - 1]) / (area[after] - area[after - 1])
        return ((v[after - 1] + part * (v[after] - v[after - 1])) ** (1 / alpha)).float().to(device)
