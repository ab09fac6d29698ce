"""Compressed pictures as squares of bytes: cut out, shrunk and decoded in one go."""

from __future__ import annotations

import math
import os
import random
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.messages import Refusal

Box = tuple[float, float, float, float]  # left, top, right, bottom
Window = Callable[[float, float], Box]  # of a picture's width and height

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision takes them
_TRIES = 10  # for a random window that fits
_MODES = {1: "L", 3: "RGB"}  # PIL's names


@dataclass(frozen=True)
class Windows:
    """Which part of a picture is shown: a random window in training, a square in the middle else."""

    area: tuple[float, float] = (0.08, 1.0)  # least and most, as a part of the picture's
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # width by height
    centre: float = 0.875  # side of the square, as a part of the picture's shorter side
    draft: bool = True  # a JPEG may be decoded at a half, a quarter or an eighth, where the window keeps its pixels

    def __post_init__(self) -> None:
        (small, large), (high, wide) = self.area, self.aspect
        if not 0 < small <= large <= 1 or not 0 < high <= wide or not 0 < self.centre <= 1:
            raise Refusal(
                f"window.area={[small, large]}, window.aspect={[high, wide]}, window.centre={self.centre}: area "
                "and centre are above 0 and at most 1, aspect is above 0, the smaller number first"
            )

    def training(self, width: float, height: float) -> Box:
        """A random window, as Szegedy et al. (2014) cut them, from Python's random numbers."""
        for _ in range(_TRIES):
            pixels = random.uniform(*self.area) * width * height
            ratio = math.exp(random.uniform(math.log(self.aspect[0]), math.log(self.aspect[1])))
            wide, high = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
            if wide <= width and high <= height:
                left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
                return left, top, left + wide, top + high
        # a very long or high picture: as much of its middle as the ratios allow
        return _middle(width, height, min(width, height * self.aspect[1]), min(height, width / self.aspect[0]))

    def evaluation(self, width: float, height: float) -> Box:
        """The square in the middle."""
        side = self.centre * min(width, height)
        return _middle(width, height, side, side)


def _middle(width: float, height: float, wide: float, high: float) -> Box:
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


# What PIL is to open, by its names for them. It knows others: for one it would start Ghostscript, whatever the file's
# name says.
FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "BMP", "TIFF", "GIF")


def decode(source: Any, size: int, channels: int, window: Window, draft: bool = True) -> Tensor:
    """The window of a picture as (channels, size, size) of uint8. `source`: a path, or an open file.

    draft: a JPEG may be decoded smaller than it is.

    Windows are cut out of the picture as it is stored, then it is turned as viewers show it (EXIF's orientation).
    Whatever is wrong with the file raises what PIL raises for it.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # here, because only data sets of files need it

    with ExitStack() as stack:
        file = stack.enter_context(open(source, "rb", opener=_regular)) if isinstance(source, str) else source
        try:
            picture = stack.enter_context(Image.open(file, formats=FORMATS))
        except UnidentifiedImageError:
            raise ValueError(f"its content is none of {', '.join(FORMATS)}") from None
        width, height = picture.size
        left, top, right, bottom = window(width, height)
        # A JPEG can be decoded at an eighth, a quarter or half of its size, in a fraction of the time: as small as
        # leaves the window at least `size` pixels in both directions.
        wanted = math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))
        drafted = picture.draft(_MODES[channels], wanted) if draft else None
        shrunk = drafted[1][2] / width if drafted else 1.0
        image = _shallow(picture).convert(_MODES[channels])
        box = left * shrunk, top * shrunk, min(right * shrunk, image.width), min(bottom * shrunk, image.height)
        square = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
        # upright by what the camera noted, as viewers do it: of a square that is cheap; a damaged note turns nothing
        with suppress(Exception):
            square = ImageOps.exif_transpose(square)
    # (size, size, channels) as it lies in memory
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, channels)
    return pixels.permute(2, 0, 1).contiguous()


def _shallow(picture: Any) -> Any:
    """A picture of PIL with 8 bits a channel. ValueError where its numbers do not show which of them is white."""
    if picture.mode[0] not in "IF":
        return picture
    white = 65535.0  # of 16 bits PIL would keep what is below 256, and make white of all else
    if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
        low, high = picture.getextrema()
        if picture.mode == "F":
            white = 1.0 if high <= 1 else 255.0
        # whole numbers of 32 bits that are all small may be those of 8 bits, or a dark picture of more
        if not 0 <= low <= high <= white or (picture.mode == "I" and 0 < high < 256):
            raise ValueError(
                f"its numbers of 32 bits go from {low:g} to {high:g}, and which one is white is not known; save it with"
                " 8 or 16 bits, or as floating-point numbers from 0 to 1"
            )
    return picture.point(lambda value: value * (255 / white)).convert("L")


def _regular(path: str, flags: int) -> int:
    """Open a regular file; OSError for what else can have a name: a pipe would keep a reader waiting for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("no regular file")
    return descriptor
