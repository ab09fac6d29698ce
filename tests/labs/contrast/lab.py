"""Self-supervised learning: a network and its moving average give like features to two views of an image (MoCo v3)."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from recipes.vision.digits import Digits
from recipes.vision.images import Images
from trainer import Task, gather


class Views(Digits):
    """Two views of every digit. The target is its index in the data set, not its label."""

    def train(self):
        return numbered(super().train().images)

    def evaluation(self):
        return numbered(super().evaluation().images)

    def augment(self, inputs, targets, random, training):  # the second call draws other numbers: another view
        return [super(Views, self).augment(inputs, targets, random, True)[0] for _ in range(2)], targets


def numbered(images):
    return Images(images, torch.arange(len(images)))


class Average(nn.Module):
    """A student network and its moving average, the teacher. Two views (B, …) to features (2, B, features) of each."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, deepcopy(student).requires_grad_(False)

    def forward(self, views):
        return [normalize(each(torch.cat(views)), dim=1).unflatten(0, (2, -1)) for each in (self.student, self.teacher)]


class Contrast(Task):
    """Each image must find its own second view among the views of all images of all ranks."""

    best = "found"

    def __init__(self, temperature: float, decay: float) -> None:
        self.temperature, self.decay = temperature, decay

    def loss(self, output, target):
        own = (gather(target) == target[:, None]).int().argmax(1)  # (B,): rows of this rank's samples among all rows
        scores = [said @ gather(taught).T for said, taught in zip(output[0], output[1].flip(0), strict=True)]
        return sum(cross_entropy(each / self.temperature, own) for each in scores)  # the mean over this rank's rows

    def metrics(self, output, target):  # only this rank's rows, because the sums of all ranks are added
        return {"found": (gather(target)[(output[0][0] @ gather(output[1][1]).T).argmax(1)] == target).sum()}

    def after_step(self, network, step):  # elementwise on this rank's part: both networks are divided alike
        for slow, fast in zip(network.teacher.parameters(), network.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.decay)
