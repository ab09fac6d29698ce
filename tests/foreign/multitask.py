"""Two heads on one trunk, targets in a dict, weights of the losses that are learned (Kendall et al., 2018)."""

import torch
from torch import nn
from torch.nn import functional as F

from recipes.vision.digits import Digits
from recipes.vision.images import Images
from trainer import Task


class TwoAnswers(Digits):
    """The class of a digit, and how much ink it has."""

    def train(self):
        return Inked(super().train())

    def evaluation(self):
        return Inked(super().evaluation())


class Inked:
    def __init__(self, images: Images):
        self.images = images.images
        self.labels, self.ink = images.labels, images.images.float().mean((1, 2, 3)) / 16

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], {"digit": self.labels[i], "ink": self.ink[i]}


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 32), nn.ReLU()
        )
        self.digit, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return {"digit": self.digit(h), "ink": self.ink(h).squeeze(-1)}


class Uncertainty(Task):
    best = "accuracy"

    def __init__(self):
        self.log_vars = nn.ParameterDict({"digit": torch.zeros(()), "ink": torch.zeros(())})

    def loss(self, output, target):
        losses = {
            "digit": F.cross_entropy(output["digit"], target["digit"]),
            "ink": F.mse_loss(output["ink"], target["ink"]),
        }
        return {k: torch.exp(-self.log_vars[k]) * v + self.log_vars[k] for k, v in losses.items()}

    def metrics(self, output, target):
        return {"accuracy": (output["digit"].argmax(1) == target["digit"]).sum()}
