"""Where an image's pixels come from: windows, boxes and small affine changes, each image by its own numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recipes.vision.pixels.boxes import aspects, sides
from trainer.data.rng import Random

_CACHED = 128  # images


def crop(images: Tensor, random: Random, padding: int, flip: bool = False) -> Tensor:
    """Cut each image at a random place from itself with a black border; with `flip`, mirror every other one.

    On the CPU in parts: the borders of a large batch leave the cache, and their memory is handed back each time.
    """
    batch, span = images.shape[0], 2 * padding + 1
    places = span * span
    choice = random.integers(0, places * (2 if flip else 1), batch)
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
    batch = images.shape[0]
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
    return sampled(images, (xx, xy, right), (yx, yy, down))


def sampled(images: Tensor, x: tuple[Tensor, Tensor, Tensor], y: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Read each output pixel from elsewhere: bilinear, black outside.

    x, y: what the output's column and row (pixels from the middle) are multiplied by, and what is added (pixels), (B,)
    each, to give the column and the row that are read.
    """
    _, _, height, width = images.shape
    column = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    row = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2

    def source(of_x: Tensor, of_y: Tensor, offset: Tensor, pixels: int) -> Tensor:
        across, along = of_x[:, None] * column + offset[:, None], of_y[:, None] * row  # (B, W), (B, H)
        return (across[:, None, :] + along[:, :, None]) * (2 / pixels)  # (B, H, W), in -1..1

    grid = torch.stack((source(*x, width), source(*y, height)), dim=-1)
    return functional.grid_sample(images.float(), grid, align_corners=False)


def resized_crop(images: Tensor, random: Random, least: float) -> Tensor:
    """Cut a random box out of each image and stretch it to the image's size (Szegedy et al. 2014).

    The box has `least` to all of the image's area, and sides of 3:4 to 4:3. Bilinear.
    """
    batch, _, height, width = images.shape
    share, turn, right, down = random.uniform(batch, 4).unbind(1)
    wide, high = sides(least + (1 - least) * share, aspects(turn, 4 / 3))  # (B,) each, as parts of the image's sides
    # in -1..1 over the image: an output pixel's place in the box, and the box's middle
    x = (torch.arange(width, device=images.device) * 2 + 1) / width - 1
    y = (torch.arange(height, device=images.device) * 2 + 1) / height - 1
    column = x * wide[:, None] + ((right * 2 - 1) * (1 - wide))[:, None]  # (B, W)
    row = y * high[:, None] + ((down * 2 - 1) * (1 - high))[:, None]  # (B, H)
    grid = torch.stack((column[:, None].expand(-1, height, -1), row[:, :, None].expand(-1, -1, width)), dim=-1)
    return functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
