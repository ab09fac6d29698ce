"""Detection, as torchvision's tutorial on PennFudan: lists of images and dicts of boxes, losses from the network."""

import torch
from torch.utils.data import Dataset
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from trainer import Data, Task


class Rectangles(Dataset):
    """Images of different sizes with one to three bright rectangles."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        height, width = (int(n) for n in torch.randint(48, 65, (2,), generator=generator))
        image = 0.2 * torch.rand(3, height, width, generator=generator)
        boxes = []
        for _ in range(int(torch.randint(1, 4, (1,), generator=generator))):
            x, y, w, h = (int(n) for n in torch.randint(8, 24, (4,), generator=generator))
            image[:, y : y + h, x : x + w] += 0.7
            boxes.append([x, y, x + w, y + h])
        return image, {"boxes": torch.tensor(boxes).float(), "labels": torch.ones(len(boxes), dtype=torch.int64)}


class PennFudan(Data):
    def train(self):
        return Rectangles(64, 1)

    def evaluation(self):
        return Rectangles(9, 2)

    def collate(self, items):
        return tuple(zip(*items, strict=True))


def retinanet():
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    return RetinaNet(backbone, num_classes=2, min_size=64, max_size=64)


class Detection(Task):
    best = "-missed"

    def forward(self, network, inputs, targets):
        return network(inputs, targets) if network.training else network(inputs)

    def loss(self, output, target):
        return output if isinstance(output, dict) else target[0]["boxes"].new_zeros(())

    def metrics(self, output, target):
        if isinstance(output, dict):
            return {}
        missed = sum(abs(int((o["scores"] > 0.5).sum()) - len(t["boxes"])) for o, t in zip(output, target, strict=True))
        return {"missed": target[0]["boxes"].new_tensor(float(missed))}
