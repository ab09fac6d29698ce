"""Augmentation of whole batches on their device, from random numbers that belong to the samples.

Every number depends on (seed, epoch, sample index) alone, so a sample looks the same however the batches are cut, on
whichever rank and in whatever order it arrives. The image functions keep that promise to the last bit: they copy
bytes, work elementwise with exactly rounded operations, or sample each image by itself; none sees the batch's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from recipes.vision.pixels.boxes import erase
from recipes.vision.pixels.colour import jitter
from recipes.vision.pixels.geometry import affine, crop, resized_crop
from recipes.vision.pixels.mixing import mix
from recipes.vision.pixels.trivial import trivial
from trainer.data.rng import Random
from trainer.messages import Refusal


@dataclass(frozen=True)
class Augment:
    """Random changes of a batch of images while training; normalisation always.

    Images are (B, C, H, W), uint8 or float; the result is float32. Zeros switch a part off. The affine and the colour
    amounts are the largest ones; each image draws its own, uniformly up to them.
    """

    crop: int = 0  # pixels of border to cut from: shifts by whole pixels, up to that many
    flip: bool = False  # left-right, by chance
    resized_crop: float = 0.0  # 0.1: a box of 10 to 100 % of the area, stretched to the image
    brightness: float = 0.0  # 0.4: times 0.6 to 1.4
    contrast: float = 0.0
    saturation: float = 0.0
    rotate: float = 0.0  # degrees
    scale: float = 0.0  # 0.1: from 10 % smaller to 10 % larger
    shear: float = 0.0  # slope: 0.1 moves a row by a tenth of its distance from the middle
    shift: float = 0.0  # pixels, fractions too
    trivial: bool = False  # TrivialAugment: each image is changed in one of fourteen ways
    erase: float = 0.0  # chance of an image that a box of it becomes the mean colour
    mixup: float = 0.0  # alpha: mixes two images and their labels; more is stronger
    cutmix: float = 0.0  # alpha: a box of another image, and a share of its label
    mean: tuple[float, ...] = (0.5,)  # of each channel (or one for all), as a part of full_scale
    std: tuple[float, ...] = (0.5,)
    full_scale: float = 255.0  # the value of white

    def __post_init__(self) -> None:
        amounts = ("crop", "brightness", "contrast", "saturation", "rotate", "scale", "shear", "shift")
        for name in (*amounts, "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise Refusal(f"augment.{name} is {getattr(self, name)}; it is the largest amount, 0 or more")
        for name in ("brightness", "contrast", "saturation", "resized_crop", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise Refusal(f"augment.{name} is {getattr(self, name)}; it is a fraction between 0 and 1")
        if self.scale >= 1:
            raise Refusal(f"augment.scale is {self.scale}; it is the fraction by which the size changes, below 1")
        if len(self.mean) != len(self.std):
            raise Refusal(f"augment.mean has {len(self.mean)} values and augment.std {len(self.std)}; expected as many")
        if not all(deviation > 0 for deviation in (*self.std, self.full_scale)):
            raise Refusal("augment.std and augment.full_scale are divided by; expected values above 0")

    def __call__(self, images: Tensor, random: Random, training: bool) -> Tensor:
        """Give the batch as the network shall see it."""
        # bytes as long as can be: windows of them are copied at a quarter of the cost
        if training and (self.crop or self.flip):
            images = crop(images, random, self.crop, self.flip)
        if training and self.resized_crop:
            images = resized_crop(images, random, self.resized_crop)
        if training and (self.brightness or self.contrast or self.saturation):
            images = jitter(images, random, self.brightness, self.contrast, self.saturation, self.full_scale)
        if training and (self.rotate or self.scale or self.shear or self.shift):
            images = affine(images, random, self.rotate, self.scale, self.shear, self.shift)
        if training and self.trivial:
            images = trivial(images, random, self.full_scale)
        images = normalise(images, tuple(self.mean), tuple(self.std), self.full_scale)
        # last, where 0 is the mean
        return erase(images, random, self.erase) if training and self.erase else images

    @property
    def mixes(self) -> bool:
        """Does it mix images with others?"""
        return self.mixup > 0 or self.cutmix > 0

    def mix(
        self, images: Tensor, targets: Tensor, others: Tensor, other_targets: Tensor, random: Random, classes: int
    ) -> tuple[Tensor, Tensor]:
        """Mix augmented images with their partners; targets become shares of so many classes."""
        return mix(images, targets, others, other_targets, random, self.mixup, self.cutmix, classes)


def resized(images: Tensor, size: int) -> Tensor:
    """Stretch float images to squares of `size` pixels: bilinear, smoothed where they shrink."""
    if images.shape[-2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", align_corners=False, antialias=True)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], full_scale: float = 255.0) -> Tensor:
    """Give (image / full_scale - mean) / std as float32, the channels each with their own mean and std.

    To the last bit what torchvision's `ToTensor` and `Normalize` give: a script that came here sees the same numbers.
    """
    if len(mean) not in (1, images.shape[1]):
        raise Refusal(
            f"data.augment.mean and data.augment.std have {len(mean)} values, the images {images.shape[1]} channels;"
            " expected 1 or as many"
        )
    # exactly rounded passes in their order: products instead of quotients, or two in one, would round differently
    result = torch.empty(images.shape, dtype=torch.float32, device=images.device).copy_(images)
    return result.div_(full_scale).sub_(_per_channel(mean, images.device)).div_(_per_channel(std, images.device))


def as_seen(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The way back, for people: normalised images (B, C, H, W) from 0, black, to 1, white."""
    device = images.device
    return (images.float() * _per_channel(std, device) + _per_channel(mean, device)).clamp(0, 1)


@cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1) on the device; kept, because copying it there in every step would wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
