"""Object detection: a list of images and a dict of boxes for each; torchvision's networks compute their losses."""

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

from trainer import Data, Task

ANCHORS = AnchorGenerator(sizes=((12, 18, 24),), aspect_ratios=((1.0,),))  # pixels


class Boxes(Data):
    """Noise (3, S, S) with one to three bright squares, and their boxes; class 1 is red, class 2 is blue."""

    def __init__(self, image_size, size):
        self.pictures, self.size = [picture(index, image_size) for index in range(size + size // 2 + 1)], size

    def train(self):
        return self.pictures[: self.size]

    def evaluation(self):
        return self.pictures[self.size :]

    def collate(self, items):  # lists: no two images need have one size, or as many boxes
        return tuple(zip(*items, strict=True))


def picture(index, side):
    generator = torch.Generator().manual_seed(index)
    image, labels = 0.3 * torch.rand(3, side, side, generator=generator), torch.arange(1 + index % 3) % 2 + 1
    corner = torch.randint(0, side - 24, (len(labels), 2), generator=generator)
    boxes = torch.cat([corner, corner + torch.randint(14, 24, (len(labels), 1), generator=generator)], 1)
    for label, (left, top, right, bottom) in zip(labels.tolist(), boxes.tolist(), strict=True):
        image[2 * label - 2, top:bottom, left:right] = 1
    return image, {"boxes": boxes.float(), "labels": labels}


def backbone(width):
    net = nn.Sequential(
        nn.Conv2d(3, width, 5, 4, 2), nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1)
    )
    net.out_channels = width  # where torchvision looks for it
    return net


def retinanet(classes, size, width):
    return RetinaNet(backbone(width), classes, size, size, anchor_generator=ANCHORS)


def fasterrcnn(classes, size, width):
    return FasterRCNN(backbone(width), classes, size, size, rpn_anchor_generator=ANCHORS)


class Detection(Task):
    """The network's own losses; of an evaluation, where it gives boxes instead, their mean average precision (mAP)."""

    best = "map50"

    def forward(self, network, inputs, targets):
        return network(inputs, targets) if network.training else network(inputs)

    def loss(self, output, target):
        return output if isinstance(output, dict) else target[0]["boxes"].new_zeros(())

    def gathered(self, output, target):
        return {"said": output, "true": list(target)}  # a dict for each image

    def finish(self, totals):
        precisions = [average_precision(totals["said"], totals["true"], kind) for kind in (1, 2)]
        return {"map50": sum(precisions) / 2}


def average_precision(said, true, kind):
    """Of the boxes of a class, the surest first: the mean, over all objects, of the precision up to each one found."""
    answers, objects = [], 0
    for some, real in zip(said, true, strict=True):
        left, own = real["boxes"][real["labels"] == kind], some["labels"] == kind
        objects += len(left)
        for box, score in zip(some["boxes"][own], some["scores"][own], strict=True):
            overlap = box_iou(box[None], left)[0]  # boxes come with the surest first
            hit = bool((overlap > 0.5).any())
            left = left[torch.arange(len(left)) != overlap.argmax()] if hit else left  # each object is found once
            answers.append((float(score), hit))
    hits = torch.tensor([hit for _, hit in sorted(answers, key=lambda answer: -answer[0])]).double()
    return float((hits * hits.cumsum(0) / torch.arange(1, len(hits) + 1)).sum() / max(objects, 1))
