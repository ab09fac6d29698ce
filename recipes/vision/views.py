"""Evaluations that look at each image several times: mirrored, and shifted by a pixel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from recipes.vision.classification import Classification
from recipes.vision.pixels.geometry import reflected


class ViewedClassification(Classification):
    """Classification whose evaluations, predictions and exports average the scores over views of an image.

    flip: the image and its mirror image. flip_shift: half of it from these two, half from both of them shifted by a
    pixel, up and left or down and right, with a reflected border: six views (Jordan 2024, arXiv:2404.00498).
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        views: Literal["flip", "flip_shift"] = "flip",
    ) -> None:
        super().__init__(label_smoothing, num_classes)
        self.views = views

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        """The scores (B, classes); in training of the image alone."""
        if network.training:
            return network(inputs)
        return sum(share * (network(view) + network(view.flip(-1))) for share, view in self._views(inputs))

    def _views(self, images: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Views (B, C, H, W), and what each and its mirror image count."""
        if self.views == "flip":
            yield 0.5, images
            return
        high, wide = images.shape[-2:]
        larger = reflected(images, 1)
        yield 0.25, images
        for at in (0, 2):
            yield 0.125, larger[..., at : at + high, at : at + wide]
