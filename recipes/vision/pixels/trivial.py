"""TrivialAugment: each image is changed in one of fourteen ways, with a strength of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.vision.pixels.colour import away_from, grey, mean
from recipes.vision.pixels.geometry import sampled
from trainer.data.rng import Random

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


class _Drawn(NamedTuple):
    """What the images of a batch have drawn, (B,) int64 each."""

    way: Tensor
    strength: Tensor  # 0 to _STRENGTHS - 1
    sign: Tensor  # -1 or 1

    @property
    def amount(self) -> Tensor:
        """The strength as a part of the largest, (B,)."""
        return self.strength.float() / (_STRENGTHS - 1)

    def takes(self, *ways: int) -> Tensor:
        """(B, 1, 1, 1): which images take one of these ways."""
        return torch.stack([self.way == one for one in ways]).any(0)[:, None, None, None]


def trivial(images: Tensor, random: Random, full_scale: float = 255.0) -> Tensor:
    """TrivialAugment (Müller, Hutter 2021) in its wide space. (B, C, H, W), uint8 or float; the result is float32."""
    batch = images.shape[0]
    way, strength = random.integers(0, 14, batch), random.integers(0, _STRENGTHS, batch)
    drawn = _Drawn(way, strength, random.integers(0, 2, batch) * 2 - 1)
    x = images.float() * (_WHITE / full_scale)
    # each image has one way, so what one change makes of it no other one sees
    x = _where(drawn.takes(_SHEAR_X, _SHEAR_Y, _MOVE_X, _MOVE_Y, _TURN), _moved, x, drawn)
    x = _where(drawn.takes(_BRIGHTNESS, _COLOUR, _CONTRAST, _SHARPNESS), _blended, x, drawn)
    x = _where(drawn.takes(_POSTERIZE, _SOLARIZE, _STRETCH, _EQUALIZE), _levels, x, drawn)
    return x * (full_scale / _WHITE)


def _where(taken: Tensor, change: Callable[[Tensor, _Drawn], Tensor], x: Tensor, drawn: _Drawn) -> Tensor:
    """The images, those that take it changed.

    Elsewhere than on the host the change is computed for all of them: to sort them the host would wait for the device.
    """
    if x.device.type != "cpu":
        return torch.where(taken, change(x, drawn), x)
    rows = taken.flatten().nonzero().flatten()
    return x.index_copy(0, rows, change(x[rows], _Drawn(*(one[rows] for one in drawn))))


def _moved(x: Tensor, drawn: _Drawn) -> Tensor:
    """Sheared, shifted or turned about the middle."""
    signed = drawn.sign * drawn.amount
    one, none = torch.ones_like(signed), torch.zeros_like(signed)
    # sine and cosine out of a table: a device's own may differ in their last bit
    cosine, sine = _turns(x.device)[:, drawn.strength]
    turned = drawn.way == _TURN
    cosine, sine = torch.where(turned, cosine, one), torch.where(turned, sine * drawn.sign, none)
    slope_x = torch.where(drawn.way == _SHEAR_X, signed * _SLOPE, none)
    slope_y = torch.where(drawn.way == _SHEAR_Y, signed * _SLOPE, none)
    right = torch.where(drawn.way == _MOVE_X, signed * _PIXELS, none)
    down = torch.where(drawn.way == _MOVE_Y, signed * _PIXELS, none)
    return sampled(x, (cosine, slope_x - sine, right), (slope_y + sine, cosine, down))


@cache
def _turns(device: torch.device) -> Tensor:
    """(2, strengths): cosine and sine of each angle."""
    with torch.inference_mode(False):
        angles = [math.radians(_DEGREES * step / (_STRENGTHS - 1)) for step in range(_STRENGTHS)]
        return torch.tensor([list(map(math.cos, angles)), list(map(math.sin, angles))]).to(device)


def _blended(x: Tensor, drawn: _Drawn) -> Tensor:
    """Moved away from black, from grey, from the mean grey, or from a blurred image, or towards it."""
    factor = (1 + drawn.sign * drawn.amount * _BLEND)[:, None, None, None]
    greys = grey(x)
    other = torch.where(drawn.takes(_COLOUR), greys, torch.zeros_like(x))
    other = torch.where(drawn.takes(_CONTRAST), mean(greys, _WHITE), other)
    other = torch.where(drawn.takes(_SHARPNESS), _blurred(x), other)
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


def _levels(x: Tensor, drawn: _Drawn) -> Tensor:
    """Grey values mapped to others: fewer of them, the bright ones turned over, stretched, or equally frequent."""
    x, amount = x.round(), drawn.amount[:, None, None, None]
    step = torch.ones_like(amount, dtype=torch.int64) << (amount * 6).round().long()  # 8 to 2 bits remain
    posterized = (x / step).floor() * step
    solarized = torch.where(x >= _WHITE * (1 - amount), _WHITE - x, x)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)  # of each channel
    stretched = torch.where(high > low, (x - low) * (_WHITE / (high - low).clamp(min=1)), x)
    result = torch.where(drawn.takes(_EQUALIZE), _equalized(x), stretched)
    result = torch.where(drawn.takes(_SOLARIZE), solarized, result)
    return torch.where(drawn.takes(_POSTERIZE), posterized, result)


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
