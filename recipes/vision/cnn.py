"""A small convolutional network for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.messages import Refusal


def _convolution(inputs: int, outputs: int, halve: bool = False) -> nn.Sequential:
    """3×3 convolution, pooling, normalisation, GELU.

    Group norm, because it does not depend on how a batch is cut. Nothing with a kink (ReLU, max-pool): where a gradient
    jumps, rounding grows into another curve (docs/strategies.md has figures).
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.AvgPool2d(2) if halve else nn.Identity(),  # before the normalisation, which then has a quarter to do
        nn.GroupNorm(outputs // 8, outputs),
        nn.GELU(),
    )


class CNN(nn.Module):
    """A 3×3 convolution, then pairs of them that double the width, then one linear layer.

    Images are halved until 7 pixels or fewer are left, so that 8 to 64 pixels work alike. Without batch statistics
    and dropout: the learning curve is the same under every strategy.
    """

    def __init__(self, num_classes: int, channels: int, image_size: int, width: int = 32) -> None:
        super().__init__()
        if width < 8:
            raise Refusal(f"model.width is {width}; at least 8 channels, for one group of the group norm")
        side, halvings = image_size, 0
        while side > 7:
            side, halvings = side // 2, halvings + 1
        early = halvings > 1  # right behind the first layer, whose full-size output is the dearest
        layers: list[nn.Module] = [_convolution(channels, width, early)]
        for left in reversed(range(halvings - early + 1)):
            layers += [_convolution(width, 2 * width), _convolution(2 * width, 2 * width, halve=left > 0)]
            width *= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) to (B, num_classes)."""
        return self.classifier(torch.flatten(self.features(images), 1))
