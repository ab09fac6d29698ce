"""torchvision's residual networks, with a stem that suits the size of the images.

Each block begins as the identity (`zero_init_residual`): without it a short run leaves ResNet-50 far behind.
"""

from __future__ import annotations

from torch import nn

from recipes.vision.backbone import marked
from recipes.vision.published import offer

_SMALL = 64  # pixels; the usual stem would shrink such images by four before the first block


def resnet18(num_classes: int, channels: int, image_size: int, weights: str = "DEFAULT") -> nn.Module:
    """ResNet-18; for images of 64 pixels or fewer the stem is 3×3 with stride 1 and without max-pool."""
    from torchvision.models import resnet18 as build  # here, because the import takes seconds

    network = _fit_stem(build(num_classes=num_classes, zero_init_residual=True), channels, image_size)
    return offer(marked(network), "resnet18", weights)


def resnet50(num_classes: int, channels: int, image_size: int, weights: str = "DEFAULT") -> nn.Module:
    """ResNet-50, with the stem of `resnet18`."""
    from torchvision.models import resnet50 as build

    network = _fit_stem(build(num_classes=num_classes, zero_init_residual=True), channels, image_size)
    return offer(marked(network), "resnet50", weights)


def _fit_stem(network: nn.Module, channels: int, image_size: int) -> nn.Module:
    """Replace the first convolution, in place, by one for these images, initialised as torchvision does."""
    small = image_size <= _SMALL
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    network.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        network.maxpool = nn.Identity()
    return network
