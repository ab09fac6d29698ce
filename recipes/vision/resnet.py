"""torchvision's residual networks, with a stem that suits the size of the images.

Each block begins as the identity (`zero_init_residual`): without it a short run leaves ResNet-50 far behind.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from recipes.vision.backbone import marked
from recipes.vision.published import offer

_SMALL = 64  # pixels; the usual stem would shrink such images by four before the first block


def resnet18(
    num_classes: int, channels: int, image_size: int, weights: str = "DEFAULT", blur: bool = False
) -> nn.Module:
    """ResNet-18; for images of 64 pixels or fewer the stem is 3×3 with stride 1 and without max-pool.

    blur: images are blurred before each convolution with a stride, but the first.
    """
    from torchvision.models import resnet18 as build  # here, because the import takes seconds

    network = _fit_stem(build(num_classes=num_classes, zero_init_residual=True), channels, image_size)
    return offer(marked(_blurred(network) if blur else network), "resnet18", weights)


def resnet50(
    num_classes: int, channels: int, image_size: int, weights: str = "DEFAULT", blur: bool = False
) -> nn.Module:
    """ResNet-50, with the stem and `blur` of `resnet18`."""
    from torchvision.models import resnet50 as build

    network = _fit_stem(build(num_classes=num_classes, zero_init_residual=True), channels, image_size)
    return offer(marked(_blurred(network) if blur else network), "resnet50", weights)


def _fit_stem(network: nn.Module, channels: int, image_size: int) -> nn.Module:
    """Replace the first convolution, in place, by one for these images, initialised as torchvision does."""
    small = image_size <= _SMALL
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    network.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        network.maxpool = nn.Identity()
    return network


class BlurredConv(nn.Conv2d):
    """A convolution of a blurred image: with a stride it would skip pixels (Zhang 2019). Names are as before."""

    def forward(self, images: Tensor) -> Tensor:
        """Twice the mean of two neighbours in both directions: [1, 2, 1] / 4, zeros outside."""
        pairs = functional.avg_pool2d(images, 2, stride=1, padding=1)  # one pixel larger
        return super().forward(functional.avg_pool2d(pairs, 2, stride=1))


def _blurred(network: nn.Module) -> nn.Module:
    """Blur before each convolution with a stride, in place; not before the first, which sees the image itself."""
    for name, module in network.named_modules():
        if name != "conv1" and isinstance(module, nn.Conv2d) and max(module.stride) > 1:
            module.__class__ = BlurredConv
    return network
