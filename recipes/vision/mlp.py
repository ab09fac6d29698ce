"""A multi-layer perceptron on the pixels."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Sequential):
    """Hidden layers with GELU between the flattened pixels and the classes."""

    def __init__(self, num_classes: int, channels: int, image_size: int, width: int = 1024, depth: int = 3) -> None:
        sizes = [channels * image_size * image_size] + [width] * depth
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
        super().__init__(*layers, nn.Linear(sizes[-1], num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) to (B, num_classes)."""
        return super().forward(images)
