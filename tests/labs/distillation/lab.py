"""Distillation: a small network (student) learns from the outputs of a large frozen network (teacher)."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from trainer import Task


class Pair(nn.Module):
    """A student and its teacher. Images to {"student": scores, "teacher": scores}, (B, classes) each.

    The teacher needs no gradient: no gradient of it is averaged, and the optimizer has no state for it.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, weights: Path | None = None) -> None:
        super().__init__()
        if weights is not None:
            teacher.load_state_dict(load_file(weights))
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, images):
        with torch.no_grad():
            taught = self.teacher.eval()(images)  # no dropout; its BatchNorms keep their statistics
        return {"student": self.student(images), "teacher": taught}


class Distillation(Task):
    """Hinton, Vinyals, Dean (2015): cross entropy with the labels, and with the teacher's softened outputs."""

    best = "accuracy"

    def __init__(self, temperature: float, share: float) -> None:
        self.temperature, self.share = temperature, share

    def loss(self, output, target):
        said, taught = (functional.log_softmax(output[who] / self.temperature, 1) for who in ("student", "teacher"))
        apart = functional.kl_div(said, taught, reduction="none", log_target=True).sum(1) * self.temperature**2  # (B,)
        labels = functional.cross_entropy(output["student"], target, reduction="none")
        count = max(len(target), 1)
        return {"teacher": self.share * apart.sum() / count, "labels": (1 - self.share) * labels.sum() / count}

    def metrics(self, output, target):
        return {"accuracy": (output["student"].argmax(1) == target).sum()}  # `finish` divides sums by the weight
