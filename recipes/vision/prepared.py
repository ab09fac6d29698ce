"""An evaluation's preparation of a picture in tensors alone: what an exported program does before its network.

Every byte is the one that PIL's `resize` gives (ImagingResample of Pillow 10 to 13, bilinear, with a box): whole
numbers below 2^53, which float64 adds without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.data.data import Preparation

_UNIT = 2.0**22  # PIL's weights are whole numbers of this part
_LUMA = (19595.0, 38470.0, 7471.0)  # PIL's grey: red, green and blue, of 65,536
_EXAMPLE = (2, 3, 40, 48)  # no two sizes alike: none is taken for another one


class PreparePictures(nn.Module):
    """Pictures (B, 3, H, W) of uint8, any H and W, to what a network is called with: (B, channels, size, size).

    The square in the middle whose side is `centre` of the shorter side; grey where there is one channel; normalised.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: int,
        channels: int,
        centre: float,
        between: nn.Module,
        white: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """between: what is done to the pixels after each direction; white: what they are divided by in the end.

        mean and std: after that, one for each channel or one for all.
        """
        super().__init__()
        self.size, self.channels, self.centre, self.between, self.white = size, channels, centre, between, white
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None, None])
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """As the set's own pictures come to the network in an evaluation."""
        pixels = images.to(torch.float64)
        pixels = _grey(pixels) if self.channels == 1 else pixels
        high, wide = (torch.scalar_tensor(length, dtype=torch.float64) for length in images.shape[-2:])
        side = self.centre * torch.minimum(high, wide)
        # one direction after the other
        pixels = self.between(pixels @ self._weights(images.shape[-1], wide, side).T)  # (B, channels, H, size)
        pixels = self.between(self._weights(images.shape[-2], high, side) @ pixels)  # (B, channels, size, size)
        return ((pixels.float() / self.white) - self.mean) / self.std

    def _weights(self, length: int, exact: Tensor, side: Tensor) -> Tensor:
        """How much of each pixel of a row goes into each new one: (size, length), as PIL computes it.

        exact: the length as a number; side: of the square in its middle.
        """
        start = (exact - side) / 2
        first, last = start.float(), (start + side).float()  # PIL keeps the box in float32
        step = (last - first).double() / self.size
        blur = step.clamp(min=1.0)
        middles = first.double() + (torch.arange(self.size, dtype=torch.float64) + 0.5) * step
        places = torch.arange(length, dtype=torch.float64) + 0.5
        weights = (1 - ((places - middles[:, None]) / blur).abs()).clamp(min=0)
        weights = weights / weights.sum(1, keepdim=True)
        return (weights * _UNIT + 0.5).floor() / _UNIT


def _grey(pixels: Tensor) -> Tensor:
    """(B, 1, H, W) of (B, 3, H, W)."""
    red, green, blue = pixels.split(1, dim=1)
    return ((red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2] + 32768) / 65536).floor()


class Bytes(nn.Module):
    """Whole numbers from 0 to 255, as PIL keeps pixels."""

    def forward(self, pixels: Tensor) -> Tensor:
        """The nearest ones."""
        return (pixels + 0.5).floor().clamp(0, 255)


def preparation(
    size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    centre: float = 1.0,
    between: nn.Module | None = None,
    white: float = 255.0,
) -> Preparation:
    """How pictures come to a network that was trained on pictures prepared so."""
    module = PreparePictures(size, channels, centre, between or Bytes(), white, mean, std)
    part = white / 255  # the facts are of a picture's white, which is 255
    facts = {
        "mean": [value * part for value in _each(mean, channels)],
        "std": [value * part for value in _each(std, channels)],
        "image_size": size,
    }
    return Preparation(
        module=module,
        example=torch.randint(0, 256, _EXAMPLE, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        raw="uint8 (B, 3, H, W): red, green and blue from 0 to 255, of any height and width",
        ready=f"float32 (B, {channels}, {size}, {size}): (pixel / 255 - mean) / std",
        facts=facts,
    )


def _each(values: Sequence[float], channels: int) -> list[float]:
    return list(values) * channels if len(values) == 1 else list(values)
