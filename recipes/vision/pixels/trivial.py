"""TrivialAugment: each image is changed in one of fourteen ways, with a strength of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from recipes.vision.pixels.colour import away_from, grey, mean
from recipes.vision.pixels.geometry import sampled
from trainer.data.draws import Random

_STRENGTHS = 31
_SLOPE, _PIXELS, _DEGREES, _BLEND = 0.99, 32.0, 135.0, 0.99  # the largest amounts, those of the paper's wide space
_WHITE = 255
(
    _SHEAR_X,
    _SHEAR_Y,
    _MOVE_X,
    _MOVE_Y,
    _TURN,
    _BRIGHTNESS,
    _COLOUR,
    _CONTRAST,
    _SHARPNESS,
    _POSTERIZE,
    _SOLARIZE,
    _STRETCH,
    _EQUALIZE,
) = range(1, 14)  # 0: as it is


def trivial(images: Tensor, random: Random, full_scale: float = 255.0) -> Tensor:
    """TrivialAugment (Müller, Hutter 2021) in its wide space. (B, C, H, W), uint8 or float; the result is float32.

    Every way is computed for every image and one is kept: to sort images by their ways the host would have to wait for
    the device.
    """
    batch = images.shape[0]
    way, strength = random.integers(0, 14, batch), random.integers(0, _STRENGTHS, batch)
    sign = (random.integers(0, 2, batch) * 2 - 1).float()
    amount = strength.float() / (_STRENGTHS - 1)
    x = images.float() * (_WHITE / full_scale)

    def at(*ways: int) -> Tensor:
        """(B, 1, 1, 1): which images take one of these ways."""
        return torch.stack([way == one for one in ways]).any(0)[:, None, None, None]

    moved = _moved(x, way, sign * amount, strength, sign)
    blended = _blended(x, at, (1 + sign * amount * _BLEND)[:, None, None, None])
    levels = _levels(x.round(), at, amount[:, None, None, None])
    x = torch.where(at(_SHEAR_X, _SHEAR_Y, _MOVE_X, _MOVE_Y, _TURN), moved, x)
    x = torch.where(at(_BRIGHTNESS, _COLOUR, _CONTRAST, _SHARPNESS), blended, x)
    x = torch.where(at(_POSTERIZE, _SOLARIZE, _STRETCH, _EQUALIZE), levels, x)
    return x * (full_scale / _WHITE)


def _moved(x: Tensor, way: Tensor, signed: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Sheared, shifted or turned about the middle."""
    one, none = torch.ones_like(signed), torch.zeros_like(signed)
    # sine and cosine out of a table: a device's own may differ in their last bit
    cosine, sine = _turns(x.device)[:, strength]
    turned = way == _TURN
    cosine, sine = torch.where(turned, cosine, one), torch.where(turned, sine * sign, none)
    slope_x = torch.where(way == _SHEAR_X, signed * _SLOPE, none)
    slope_y = torch.where(way == _SHEAR_Y, signed * _SLOPE, none)
    right = torch.where(way == _MOVE_X, signed * _PIXELS, none)
    down = torch.where(way == _MOVE_Y, signed * _PIXELS, none)
    return sampled(x, (cosine, slope_x - sine, right), (slope_y + sine, cosine, down))


@cache
def _turns(device: torch.device) -> Tensor:
    """(2, strengths): cosine and sine of each angle."""
    with torch.inference_mode(False):
        angles = [math.radians(_DEGREES * step / (_STRENGTHS - 1)) for step in range(_STRENGTHS)]
        return torch.tensor([list(map(math.cos, angles)), list(map(math.sin, angles))]).to(device)


def _blended(x: Tensor, at: Callable[..., Tensor], factor: Tensor) -> Tensor:
    """Moved away from black, from grey, from the mean grey, or from a blurred image, or towards it."""
    greys = grey(x)
    other = torch.where(at(_CONTRAST), mean(greys, _WHITE), torch.where(at(_COLOUR), greys, torch.zeros_like(x)))
    other = torch.where(at(_SHARPNESS), _blurred(x), other)
    return away_from(other, x, factor).clamp_(0, _WHITE)


def _blurred(x: Tensor) -> Tensor:
    """Each pixel but those of the edge as a mean with its neighbours, in which it counts five times (as in Pillow)."""
    height, width = x.shape[-2:]
    total = x[..., 1:-1, 1:-1] * 4
    for down in range(3):
        for right in range(3):
            total = total + x[..., down : height - 2 + down, right : width - 2 + right]
    blurred = x.clone()
    blurred[..., 1:-1, 1:-1] = total / 13
    return blurred


def _levels(x: Tensor, at: Callable[..., Tensor], amount: Tensor) -> Tensor:
    """Grey values mapped to others: fewer of them, the bright ones turned over, stretched, or equally frequent."""
    step = torch.ones_like(amount, dtype=torch.int64) << (amount * 6).round().long()  # 8 to 2 bits remain
    posterized = (x / step).floor() * step
    solarized = torch.where(x >= _WHITE * (1 - amount), _WHITE - x, x)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)  # of each channel
    stretched = torch.where(high > low, (x - low) * (_WHITE / (high - low).clamp(min=1)), x)
    x = torch.where(at(_EQUALIZE), _equalized(x), x)
    x = torch.where(at(_STRETCH), stretched, x)
    return torch.where(at(_POSTERIZE), posterized, torch.where(at(_SOLARIZE), solarized, x))


def _equalized(x: Tensor) -> Tensor:
    """Each channel with its grey values about equally frequent, in whole numbers, as Pillow does it."""
    values = x.long().clamp_(0, _WHITE).flatten(2)  # (B, C, pixels)
    counts = torch.zeros(*values.shape[:2], _WHITE + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    below = counts.cumsum(2) - counts
    # the count of the largest value that occurs does not count
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // _WHITE
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(max=_WHITE)
    table = torch.where(step > 0, table, torch.arange(_WHITE + 1, device=x.device))
    return table.gather(2, values).view_as(x).float()
