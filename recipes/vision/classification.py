"""One label an image, out of a fixed number of classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.vision.plans import torchvision_plan
from trainer.learning.parallel_plan import Plan
from trainer.learning.task import Task
from trainer.messages import BadData, Refusal

_NO_LABEL = -(2**62)  # what torch's cross entropy is to pass over: nothing; -100 is no class either
_MATRIX = 1000  # classes: of more a matrix takes gigabytes in each micro-batch, and no picture shows it


class Classification(Task):
    """Cross entropy over classes; accuracy, and macro accuracy: the mean over classes of each one's own accuracy.

    Targets are class numbers (B,), or shares of the classes (B, classes) as mixup and cutmix make them.
    """

    best = "accuracy"

    def __init__(self, label_smoothing: float = 0.0, num_classes: int | None = None) -> None:
        if not 0 <= label_smoothing <= 1:
            raise Refusal(f"task.label_smoothing is {label_smoothing}; it is a fraction of the target, between 0 and 1")
        self.label_smoothing = label_smoothing
        self._classes = num_classes or 0  # of the data, where it knows them
        self._looked = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean cross entropy over the samples; 0 where there are none. BadData where a class has no output."""
        if output.dim() != 2:
            raise BadData(
                f"the network gives scores {tuple(output.shape)}; task=classification takes (samples, classes),"
                " task=language (samples, tokens, vocabulary)"
            )
        outputs = output.shape[1]
        if outputs < self._classes:
            raise BadData(
                f"the data has {self._classes} classes, and the network's output is {outputs} wide: too few; its yaml"
                " takes num_classes: ${data.num_classes}"
            )
        # An accelerator ends with an assert that names nothing. To ask for its numbers makes the host wait: once, in
        # the evaluation that runs begin with.
        if not self._looked and output.device.type != "cpu" and not torch.is_grad_enabled():
            self._looked = True
            _refuse_strange(target, outputs)
        try:
            total = functional.cross_entropy(
                output, target, reduction="sum", ignore_index=_NO_LABEL, label_smoothing=self.label_smoothing
            )
        except IndexError:  # the same on a CPU
            _refuse_strange(target, outputs)
            raise
        return total / max(target.shape[0], 1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """How many samples are right, and the confusion matrix: row = true class, column = class said.

        Of more than a thousand classes only how many samples of each there are, and how many of these are right.
        """
        target = target.argmax(1) if target.dim() > 1 else target  # the true class is that with the largest share
        classes = torch.arange(output.shape[1], device=output.device)
        said = output.argmax(1)
        truth, right = target[:, None] == classes, said == target  # (B, classes), (B,)
        if output.shape[1] > _MATRIX:
            return {"correct": right.sum(), "of_class": truth.sum(0), "right": (truth & right[:, None]).sum(0)}
        answer = said[:, None] == classes  # (B, classes)
        # ones and zeros, exact in fp32 up to 16.7 million of them; in bf16, as autocast would have it, up to 256
        with torch.autocast(output.device.type, enabled=False):
            confusion = truth.float().T @ answer.float()
        return {"correct": right.sum(), "confusion": confusion}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Loss, accuracy and macro accuracy over the whole set; classes that have no sample do not count."""
        confusion = totals.get("confusion")
        samples = totals["of_class"] if confusion is None else confusion.double().sum(1)
        right = totals["right"] if confusion is None else confusion.double().diagonal()
        each = right[samples > 0].double() / samples[samples > 0].double()
        return {
            "loss": float(totals["loss"] / totals["weight"]),
            "accuracy": float(totals["correct"] / totals["samples"]),
            "macro_accuracy": float(each.mean()),
        }

    def probabilities(self, output: Any) -> Tensor | None:
        """The softmax of scores (B, classes); None of others."""
        if not isinstance(output, Tensor) or output.dim() != 2:
            return None
        return output.softmax(1, torch.float64 if output.dtype == torch.float64 else torch.float32)

    def confusion(self, totals: dict[str, Tensor]) -> Tensor | None:
        """The confusion matrix that `metrics` has summed up; None of more than a thousand classes."""
        return totals.get("confusion")

    def plan(self, network: nn.Module) -> Plan:
        """What the network says itself, else the plan that is known for torchvision's networks."""
        return super().plan(network) if hasattr(network, "plan") else torchvision_plan(network)


def _refuse_strange(target: Tensor, outputs: int) -> None:
    """BadData where a label (B,) is none of those that the outputs stand for."""
    wrong = (target >= outputs) | (target < 0)
    if target.dim() == 1 and wrong.any():  # not of shares, which are numbers from 0 to 1
        label = int(target[wrong][0])
        raise BadData(f"a label is {label}; the network's output is {outputs} wide, for labels from 0 to {outputs - 1}")
