"""A task of the lab's own: samples of unequal weight, figures that are no means."""

import torch
from torch import Tensor
from torch.nn import functional

from trainer import Task


class Sorting(Task):
    """Cross entropy over the samples that count; recall over classes and perplexity from totals."""

    best = "recall"

    def loss(self, output: Tensor, target: dict[str, Tensor]) -> dict[str, Tensor]:
        each = functional.cross_entropy(output, target["label"], reduction="none")
        count = self.weight(target).clamp(min=1)
        size = 1e-3 * output.square().sum(1)  # (B,); what does not count must not: a slice may hold nothing else
        return {name: (part * target["counts"]).sum() / count for name, part in (("entropy", each), ("size", size))}

    def weight(self, target: dict[str, Tensor]) -> Tensor:
        return target["counts"].sum()

    def metrics(self, output: Tensor, target: dict[str, Tensor]) -> dict[str, Tensor]:
        classes = torch.arange(output.shape[1], device=output.device)
        truth = (target["label"][:, None] == classes).double() * target["counts"][:, None]
        said = (output.argmax(1)[:, None] == classes).double()
        return {"confusion": truth.T @ said}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        confusion = totals["confusion"]
        loss = float(totals["loss"] / totals["weight"])
        recall = (confusion.diagonal() / confusion.sum(1).clamp(min=1)).mean()
        return {"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "recall": float(recall)}
