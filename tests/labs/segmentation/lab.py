"""Semantic segmentation: batches are dicts, and so are the outputs of torchvision's networks."""

import torch
from torch.nn.functional import cross_entropy

from trainer import Data, Task

VOID = 255  # a pixel without label
SHARES = {"out": 1.0, "aux": 0.5}  # some of the networks have a second head


class Discs(Data):
    """Noise (3, S, S) with a green and a blue disc, and a mask (S, S): 0 background, 1 green, 2 blue."""

    def __init__(self, image_size, size):
        self.pictures, self.size = [picture(index, image_size) for index in range(size + size // 2 + 1)], size

    def train(self):
        return self.pictures[: self.size]  # a list has a length and [i]

    def evaluation(self):
        return self.pictures[self.size :]


def picture(index, side):
    generator = torch.Generator().manual_seed(index)
    image, mask = torch.rand(3, side, side, generator=generator) - 0.5, torch.zeros(side, side).long()
    line = torch.arange(side) / side
    for kind in (1, 2):
        row, column, radius = torch.rand(3, generator=generator)
        inside = (line[:, None] - row) ** 2 + (line - column) ** 2 < (0.2 + 0.2 * radius) ** 2
        image[kind, inside], mask[inside] = image[kind, inside] + 0.5, kind
    mask[0, : index % side] = VOID  # so images have different numbers of labelled pixels
    return {"image": image}, {"mask": mask}


class Segmentation(Task):
    """Cross entropy over the labelled pixels; mean intersection over union."""

    best = "mean_iou"

    def forward(self, network, inputs, targets):
        return network(inputs["image"])  # {"out": (B, classes, S, S)}

    def loss(self, output, target):
        mask, count = target["mask"], self.weight(target).clamp(min=1)
        sums = {name: cross_entropy(said, mask, ignore_index=VOID, reduction="sum") for name, said in output.items()}
        return {name: SHARES[name] * total / count for name, total in sums.items()}

    def weight(self, target):
        return (target["mask"] != VOID).sum()

    def metrics(self, output, target):
        mask, classes = target["mask"].flatten(), output["out"].shape[1]
        cells = mask.clamp(max=classes - 1) * classes + output["out"].argmax(1).flatten()
        return {"confusion": cells.new_zeros(classes**2).scatter_add_(0, cells, (mask < VOID).long()).view(classes, -1)}

    def finish(self, totals):
        right, table = totals["confusion"].diagonal(), totals["confusion"]  # row: true class, column: predicted class
        return {"mean_iou": float((right / (table.sum(0) + table.sum(1) - right).clamp(min=1)).mean())}
