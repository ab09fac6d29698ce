"""How far the pixels of an exported preparation lie from those of an evaluation: python scripts/prepared_gap.py"""

from __future__ import annotations

import io
import time

import numpy
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from recipes.vision.decode import Windows, decode
from recipes.vision.prepared import preparation

PICTURES = ((300, 200), (640, 480), (1600, 1200), (4000, 3000))
SIZES = (32, 64, 224)


def photo(width: int, height: int) -> Image.Image:
    """Noise with the spectrum of photographs: the larger a spot, the stronger."""
    random, pixels, spot = numpy.random.default_rng(1), numpy.zeros((height, width, 3)), 1
    while spot < max(width, height):
        noise = random.normal(0, spot**0.8, (3, height // spot + 2, width // spot + 2)).astype("f4")
        layers = [Image.fromarray(one).resize((width, height), Image.Resampling.BILINEAR) for one in noise]
        pixels, spot = pixels + numpy.stack([numpy.asarray(layer) for layer in layers], -1), 2 * spot
    pixels = (pixels - pixels.mean()) / pixels.std() * 50 + 128
    return Image.fromarray(pixels.clip(0, 255).astype("uint8"))


def main() -> None:
    """A line for each kind of file, size of picture and size of the network's images."""
    window = Windows()
    for width, height in PICTURES:
        picture = photo(width, height)
        for kind in ("PNG", "JPEG"):
            file = io.BytesIO()
            picture.save(file, kind)
            pixels = pil_to_tensor(Image.open(file).convert("RGB"))[None]
            for size, channels in ((size, channels) for size in SIZES for channels in (3, 1)):
                own = decode(file, size, channels, window.evaluation).float()
                prepare, began = preparation(size, channels, [0.0], [1.0], window.centre).module, time.perf_counter()
                gap = (prepare(pixels)[0] * 255 - own).abs().round()
                took = time.perf_counter() - began
                what = f"{kind} {width}×{height} to {channels}×{size}×{size}"
                print(f"{what:32} largest {gap.max():.0f}, mean {gap.mean():.2f} of 255; {took:.2f} s", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
