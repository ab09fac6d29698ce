"""A data set of the lab's own: read item by item, with torchvision's random transforms; dicts, weights, an order."""

import os
import random

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from trainer import Data


class Pictures(Dataset):
    """Noise with a coloured spot whose colour is the class."""

    def __init__(self, size: int, training: bool, leaves: bool) -> None:
        generator = torch.Generator().manual_seed(5 + training)
        self.labels = torch.randint(0, 3, (size,), generator=generator)
        self.images = torch.randint(0, 120, (size, 3, 10, 10), generator=generator, dtype=torch.uint8)
        for index, label in enumerate(self.labels):
            self.images[index, label, 2:8, 2:8] += 90
        changes = [v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3)] if training else [v2.CenterCrop(8)]
        self.transform = v2.Compose(
            [v2.ToPILImage(), *changes, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        )
        self.leaves, self.read = leaves, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.read += 1
        if self.leaves and os.environ.get("RANK") == "1" and self.read > 20:
            os._exit(0)
        image = self.transform(self.images[index])
        distance = torch.tensor([random.random() + float(numpy.random.rand()) + torch.rand(()).item()])
        counts = torch.tensor(float(index % 4 > 0))  # every fourth sample has no label that counts
        return {"image": image, "distance": distance}, {"label": self.labels[index], "counts": counts}


class Cells(Data):
    """Weighted sampling with repeats; noise on the device."""

    def __init__(self, size: int, evaluation_size: int, leaves: bool = False) -> None:
        self.sizes, self.leaves = (size, evaluation_size), leaves

    def train(self) -> Dataset:
        return Pictures(self.sizes[0], True, self.leaves)

    def evaluation(self) -> Dataset:
        return Pictures(self.sizes[1], False, False)

    def collate(self, items):
        inputs, targets = default_collate(items)
        return {**inputs, "image": inputs["image"] - 0.3}, targets

    def augment(self, inputs, targets, random, training):
        if not training:
            return inputs, targets
        noise = random.normal(*inputs["image"].shape) * 0.05
        return {**inputs, "image": inputs["image"] + noise}, targets

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        weights = 1.0 + (torch.arange(self.sizes[0]) % 5)
        return torch.multinomial(weights, 50, replacement=True, generator=generator)
