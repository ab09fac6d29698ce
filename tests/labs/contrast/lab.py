"""Self-supervision: two views of a picture must look alike to a network and to its own moving average (MoCo v3)."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from recipes.vision.digits import Digits
from recipes.vision.images import Images
from trainer import Task, gather


class Views(Digits):
    """Two views of every digit. The target is which digit it is: its number in the data set, not its label."""

    def train(self):
        return numbered(super().train().images)

    def evaluation(self):
        return numbered(super().evaluation().images)

    def augment(self, inputs, targets, random, training):  # `random` goes on: the second view is another one
        return [super(Views, self).augment(inputs, targets, random, True)[0] for _ in range(2)], targets


def numbered(images):
    return Images(images, torch.arange(len(images)))


class Average(nn.Module):
    """A network and its moving average, which teaches it. Two views (B, …) to (2, B, features) of each."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, deepcopy(student).requires_grad_(False)

    def forward(self, views):
        return [normalize(each(torch.cat(views)), dim=1).unflatten(0, (2, -1)) for each in (self.student, self.teacher)]


class Contrast(Task):
    """Each picture must find its own other view among those of all pictures of all ranks."""

    best = "found"

    def __init__(self, temperature: float, decay: float) -> None:
        self.temperature, self.decay = temperature, decay

    def loss(self, output, target):
        own = (gather(target) == target[:, None]).int().argmax(1)  # (B,): where this rank's samples stand among all
        scores = [said @ gather(taught).T for said, taught in zip(output[0], output[1].flip(0), strict=True)]
        return sum(cross_entropy(each / self.temperature, own) for each in scores)  # this rank's own rows: their mean

    def metrics(self, output, target):  # of this rank's rows alone, for the sums of all ranks are added up
        return {"found": (gather(target)[(output[0][0] @ gather(output[1][1]).T).argmax(1)] == target).sum()}

    def after_step(self, network, step):  # elementwise on what this rank holds: the two are spread alike
        for slow, fast in zip(network.teacher.parameters(), network.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.decay)
