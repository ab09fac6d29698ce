"""A small network that learns CIFAR-10 in seconds, after K. Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU.

The paper is arXiv:2404.00498, its program github.com/KellerJordan/cifar10-airbench. This is written anew from them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.vision.backbone import marked
from recipes.vision.pictures import Pictures
from trainer.data.rng import Random
from trainer.messages import Refusal

_PATCH = 2  # pixels: side of the patches that the first layer makes independent of each other
_SEEN = 5000  # images whose patches it knows
_LEAST = 5e-4  # added to variances, so that no direction is stretched without limit
_PART = 500  # images whose patches are in memory at the same time


class ConvGroup(nn.Module):
    """Two 3×3 convolutions that begin by copying their inputs; images are halved after the first."""

    def __init__(self, inputs: int, outputs: int, momentum: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = _copying(inputs, outputs), _shifted(outputs, momentum)
        self.conv2, self.norm2 = _copying(outputs, outputs), _shifted(outputs, momentum)
        self.pool, self.activation = nn.MaxPool2d(2), nn.GELU()

    def forward(self, images: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H // 2, W // 2)."""
        images = self.activation(self.norm1(self.pool(self.conv1(images))))
        return self.activation(self.norm2(self.conv2(images)))


def _copying(inputs: int, outputs: int) -> nn.Conv2d:
    """A convolution whose first outputs are its inputs at the beginning."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:inputs])
    return conv


def _shifted(channels: int, momentum: float) -> nn.BatchNorm2d:
    """Batch norm that learns a bias alone. momentum: as the paper counts it, of the old statistics."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=1 - momentum)
    norm.weight.requires_grad_(False)
    return norm


class Airbench(nn.Module):
    """A fixed whitening layer with a bias, three groups of convolutions, the largest value of each channel, a layer."""

    def __init__(self, num_classes: int, channels: int, width: int, momentum: float, scale: float) -> None:
        super().__init__()
        features = 2 * channels * _PATCH**2  # each direction, and its opposite
        self.scale = scale
        self.whiten = nn.Conv2d(channels, features, _PATCH)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]  # it has one
        self.activation = nn.GELU()
        self.groups = nn.Sequential(
            ConvGroup(features, width, momentum),
            ConvGroup(width, 4 * width, momentum),
            ConvGroup(4 * width, 4 * width, momentum),
        )
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.head = nn.Linear(4 * width, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) to (B, num_classes)."""
        features = self.pool(self.groups(self.activation(self.whiten(images))))
        return self.head(features.flatten(1)) * self.scale


def airbench(
    num_classes: int,
    channels: int,
    image_size: int,
    images: Pictures,
    width: int = 64,
    momentum: float = 0.6,
    scale: float = 1 / 9,
) -> nn.Module:
    """The network, its first layer whitening the patches of the first training images. images: those of the run."""
    if image_size < 16:
        raise Refusal(f"model=airbench: data.image_size={image_size}; it halves images three times: 16 pixels or more")
    network = Airbench(num_classes, channels, width, momentum, scale)
    with torch.no_grad():
        network.whiten.weight.copy_(whitening(first_images(images)))
    return marked(network, "head")


def first_images(images: Pictures) -> Tensor:
    """The first training images as an evaluation shows them: (N, C, H, W) of float32."""
    indices = torch.arange(min(_SEEN, len(images.plain_train())), device="cpu")
    pixels, labels = images.plain_train().batch(indices)
    return images.augment(pixels, labels, Random(0, 0, indices), training=False)[0]


def whitening(images: Tensor) -> Tensor:
    """The weights (2 · C · 4, C, 2, 2) whose outputs on patches of images (N, C, H, W) have variance 1, uncorrelated.

    The directions of most variance come first, then their opposites.
    """
    channels, count = images.shape[1], 0
    total = torch.zeros(channels * _PATCH**2, channels * _PATCH**2, dtype=torch.float64, device="cpu")
    for part in images.split(_PART):
        patches = functional.unfold(part.double(), _PATCH)  # (n, C · 4, places)
        total = total + (patches @ patches.mT).sum(0)
        count += patches.shape[0] * patches.shape[2]
    variances, directions = torch.linalg.eigh(total / count)  # growing; a column for each
    rows = (directions / (variances + _LEAST).sqrt()).T.flip(0)
    # an eigenvector's opposite is one as well: its largest part decides, or libraries would differ
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    return torch.cat((rows, -rows)).view(-1, channels, _PATCH, _PATCH).float()
