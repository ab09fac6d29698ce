"""Augmentation of whole batches on their device, from random numbers that belong to the samples.

Every number depends on (seed, epoch, sample index) alone, so a sample looks the same however the batches are cut, on
whichever rank and in whatever order it arrives. The image functions keep that promise to the last bit: they copy
bytes, work elementwise with exactly rounded operations, or sample each image by itself; none sees the batch's shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional

from trainer.data.seeds import GOLDEN, POSITIVE, mix, mixed, signed
from trainer.devices import widest
from trainer.refusal import Refusal

_CACHED = 128  # images


class Random:
    """Random numbers for a batch: one counter-based stream a sample, the same bits on CPU and GPU.

    Successive calls continue the streams: `uniform(B, 3)` gives the numbers of `uniform(B)` called three times.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor) -> None:
        self._seed, self._epoch, self._indices = seed, epoch, indices
        self._drawn = 0  # numbers of each stream

    @cached_property
    def _start(self) -> Tensor:
        """Where each sample's stream begins: (B,) int64. Made when it is first asked for: many batches need none."""
        return mixed(self._indices * signed(GOLDEN) + mix(self._seed, self._epoch))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 numbers in [0, 1), multiples of 2^-24; the first dimension is the batch."""
        return (self._words(shape) >> 39).float().mul_(2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32 numbers; the first dimension is the batch.

        The quantile function is a table with linear interpolation, because a device's own log and cos may differ in
        their last bit. Cells halve towards the tail: 256 for each power of two of the probability, down to 2^-32.
        """
        drawn = self._words(shape)
        # 33 bits want float64: where the device has none the host computes, and waits for it
        words = drawn if widest(drawn.device) == torch.float64 else drawn.cpu()
        tail, power = torch.frexp(((words >> 31) + 1).double())  # P(|z| > result) = tail · 2^power / 2^32
        place = (tail - 0.5) * 512
        cell = place.floor()
        index = power.long() * 256 + cell.long()
        table = _quantiles(words.device)
        near, far = table[index], table[index + 1]
        # (B, …): between two entries of the table, with a sign from the lowest bit, which the tail does not use
        magnitude = near + (far - near) * (place - cell).float()
        return (magnitude * (1 - 2 * (words & 1)).float()).to(drawn.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Int64 numbers in [low, high); the first dimension is the batch."""
        if high <= low:
            raise ValueError(f"integers in [{low}, {high}) do not exist")
        return self._words(shape).remainder_(high - low).add_(low)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        """The next 63 random bits for each element of the shape."""
        batch = self._indices.shape[0]
        if not shape or shape[0] != batch:
            raise ValueError(f"shape {shape} must begin with the batch of {batch}")
        # The counter goes on where the last call ended, so that no two calls share numbers.
        count = math.prod(shape[1:])
        counter = torch.arange(self._drawn + 1, self._drawn + count + 1, device=self._indices.device)
        words = mixed(self._start[:, None] + counter * signed(GOLDEN)).bitwise_and_(POSITIVE)
        self._drawn += count
        return words.view(shape)


@cache
def _quantiles(device: torch.device) -> Tensor:
    """Half-normal quantiles at the probabilities (0.5 + cell / 512) · 2^(power - 32), at index power · 256 + cell."""
    with torch.inference_mode(False):
        cells = torch.arange(34 * 256 + 1, dtype=torch.float64)
        probability = (0.5 + (cells % 256) / 512) * 2.0 ** (torch.floor(cells / 256) - 32)
        return (-torch.special.ndtri(probability.clamp(max=1.0) / 2)).float().to(device)


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and small affine changes of a batch of images while training; normalisation always.

    Images are (B, C, H, W), uint8 or float; the result is float32. Zeros switch a part off. The affine amounts are the
    largest ones; each image draws its own, uniformly up to them.
    """

    crop: int = 0  # pixels of black border to cut from: shifts by whole pixels, up to that many
    flip: bool = False  # left-right, every other image
    rotate: float = 0.0  # degrees
    scale: float = 0.0  # 0.1: from 10 % smaller to 10 % larger
    shear: float = 0.0  # slope: 0.1 moves a row by a tenth of its distance from the middle
    shift: float = 0.0  # pixels, fractions too
    mean: tuple[float, ...] = (0.5,)  # of each channel (or one for all), as a part of full_scale
    std: tuple[float, ...] = (0.5,)
    full_scale: float = 255.0  # the value of white

    def __post_init__(self) -> None:
        for name in ("crop", "rotate", "scale", "shear", "shift"):
            if getattr(self, name) < 0:
                raise Refusal(f"augment.{name} is {getattr(self, name)}; it is the largest amount, 0 or more")
        if self.scale >= 1:
            raise Refusal(f"augment.scale is {self.scale}; it is the part by which the size changes, below 1")
        if len(self.mean) != len(self.std):
            raise Refusal(f"augment.mean has {len(self.mean)} values and augment.std {len(self.std)}; expected as many")
        if not all(deviation > 0 for deviation in (*self.std, self.full_scale)):
            raise Refusal("augment.std and augment.full_scale are divided by; expected values above 0")

    def __call__(self, images: Tensor, random: Random, training: bool) -> Tensor:
        """Give the batch as the network shall see it."""
        if training and (self.crop or self.flip):
            images = crop(images, random, self.crop, self.flip)
        if training and (self.rotate or self.scale or self.shear or self.shift):
            images = affine(images, random, self.rotate, self.scale, self.shear, self.shift)
        return normalise(images, tuple(self.mean), tuple(self.std), self.full_scale)


def crop(images: Tensor, random: Random, padding: int, flip: bool = False) -> Tensor:
    """Cut each image at a random place from itself with a black border; with `flip`, mirror every other one.

    On the CPU in parts: the borders of a large batch leave the cache, and their memory is handed back each time.
    """
    batch, span = images.shape[0], 2 * padding + 1
    choice = random.integers(0, span * span * (2 if flip else 1), batch)
    part = _CACHED if images.device.type == "cpu" else max(batch, 1)
    pieces = zip(images.split(part), choice.split(part), strict=True)
    done = [_cut_out(some, chosen, padding, flip) for some, chosen in pieces]
    return torch.cat(done) if len(done) > 1 else done[0]


def _cut_out(images: Tensor, choice: Tensor, padding: int, flip: bool) -> Tensor:
    """A cut-out is one contiguous window of the bordered batch, read with the border's row length: a copy an image.

    choice: (B,) place of the window in the border, then, with `flip`, whether of the mirrored image.
    """
    batch, channels, height, width = images.shape
    rows, columns = height + 2 * padding, width + 2 * padding
    size, span = channels * rows * columns, 2 * padding + 1
    bordered = images.new_zeros(2 if flip else 1, batch, channels, rows, columns)
    inside = bordered[..., padding : padding + height, padding : padding + width]
    inside[0].copy_(images)
    if flip:
        inside[1].copy_(images.flip(-1))
    mirrored, place = choice // (span * span), choice % (span * span)
    sample = mirrored * batch + torch.arange(batch, device=images.device)
    start = sample * size + (place // span) * columns + place % span
    length = size - 2 * padding * (columns + 1)  # from the first pixel of the last possible cut-out to the batch's end
    windows = bordered.as_strided((max(bordered.numel() - length + 1, 0), length), (1, 1))
    strides = (length, rows * columns, columns, 1)
    return windows.index_select(0, start).as_strided((batch, channels, height, width), strides)


def affine(
    images: Tensor, random: Random, rotate: float = 0.0, scale: float = 0.0, shear: float = 0.0, shift: float = 0.0
) -> Tensor:
    """Rotate (degrees), scale, shear (slope) and shift (pixels) each image by its own amounts up to those given.

    Bilinear; what comes from outside is black. The angle is drawn as tan(angle / 2), which for small angles is uniform
    too and needs no sine, whose bits depend on the device.
    """
    batch, _, height, width = images.shape
    amounts = (math.tan(math.radians(rotate) / 2), scale, shear, shift, shift)
    draws = (random.uniform(batch, 5) * 2 - 1).unbind(1)
    half, larger, slope, right, down = (draw * amount for draw, amount in zip(draws, amounts, strict=True))
    # From tan(angle / 2) to the turn, by exactly rounded operations: (B,) each.
    square = half * half
    cosine, sine = (1 - square) / (1 + square), 2 * half / (1 + square)
    zoom = 1 / (1 + larger)
    # where output pixel (x, y), counted from the middle, is read from: turn · [[1, slope], [0, 1]] · zoom
    xx, xy = cosine * zoom, (cosine * slope - sine) * zoom
    yx, yy = sine * zoom, (sine * slope + cosine) * zoom
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2

    def source(of_x: Tensor, of_y: Tensor, offset: Tensor, pixels: int) -> Tensor:
        column, row = of_x[:, None] * x + offset[:, None], of_y[:, None] * y  # (B, W), (B, H)
        return (column[:, None, :] + row[:, :, None]) * (2 / pixels)  # (B, H, W), in -1..1

    grid = torch.stack((source(xx, xy, right, width), source(yx, yy, down, height)), dim=-1)
    return functional.grid_sample(images.float(), grid, align_corners=False)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], full_scale: float = 255.0) -> Tensor:
    """Give (image / full_scale - mean) / std as float32, the channels each with their own mean and std."""
    if len(mean) not in (1, images.shape[1]):
        raise Refusal(
            f"mean and std have {len(mean)} values, the images {images.shape[1]} channels; expected 1 or as many"
        )
    factor = tuple(1 / (full_scale * deviation) for deviation in std)
    offset = tuple(-average / deviation for average, deviation in zip(mean, std, strict=True))
    # two exactly rounded passes: one fused multiply-add would round differently in a vector's tail
    result = torch.empty(images.shape, dtype=torch.float32, device=images.device).copy_(images)
    return result.mul_(_per_channel(factor, images.device)).add_(_per_channel(offset, images.device))


@cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1) on the device; kept, because copying it there in every step would wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
