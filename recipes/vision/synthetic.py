"""Images made from a seed, for tests and measurements."""

from __future__ import annotations

import torch
from torch.nn import functional

from recipes.vision.augment import Augment
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures


class SyntheticImages(Pictures):
    """Noise of any size in any number of classes; where learnable, each class has a faint pattern of its own."""

    def __init__(
        self,
        augment: Augment,
        size: int,
        evaluation_size: int,
        num_classes: int,
        channels: int,
        image_size: int,
        learnable: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(augment)
        self.num_classes, self.stored = num_classes, (3 if channels == 3 else 1, image_size)
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(num_classes, channels, 4, 4, generator=generator)
        patterns = functional.interpolate(coarse, size=(image_size, image_size), mode="nearest")
        strength = 24 if learnable else 0  # of 255, in noise of 48

        def draw(samples: int) -> Images:
            labels = torch.randint(0, num_classes, (samples,), generator=generator)
            images = torch.empty(samples, channels, image_size, image_size, dtype=torch.uint8)
            for index, label in enumerate(labels):  # one at a time: the floats of all would be four times the set
                noise = torch.randn(channels, image_size, image_size, generator=generator)
                images[index] = (128 + strength * patterns[label] + 48 * noise).clamp_(0, 255)
            return Images(images, labels)

        self._parts = {True: draw(size), False: draw(evaluation_size)}

    def evaluation(self) -> Images | None:
        """Other images of the same classes; None where their number is 0."""
        return self._parts[False] if len(self._parts[False]) else None

    def _read(self, training: bool) -> Images:
        return self._parts[training]
