"""Data, tasks, schedules and optimizers: the right ones first, then some with a mistake each, as users make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.planted.networks import CLASSES, WIDTH, rank
from trainer import Data, Schedule, Task

SAMPLES = 96


class Numbers(Data):
    """Right everywhere."""

    def train(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def evaluation(self) -> Any:
        return self.train()


class Odd(Numbers):
    """An evaluation set whose last batch is one sample: a rank may have none of it. This is right everywhere."""

    def evaluation(self) -> Any:
        return TensorDataset(*self.train()[:49])


class Rows(Dataset[Any]):
    """Samples of three to six rows, and what is known of each: a dict, in which not all have the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.randn(3 + index % 4, WIDTH, generator=torch.Generator().manual_seed(index))
        known = {"label": rows.sum(0)[:CLASSES].argmax(), "first": rows[0]}
        return rows, known | ({"odd": rows[1]} if index % 2 else {})


class Listed(Numbers):
    """A batch as torchvision's detection has it, in a dict of lists and a list of dicts. This is right everywhere."""

    def train(self) -> Any:
        return Rows()

    def collate(self, items: Any) -> Any:
        inputs, targets = zip(*items, strict=True)
        return {"rows": list(inputs), "first": [known["first"] for known in targets]}, targets


class Graphs(Numbers):
    """Graphs of three nodes each, which follow each other in a batch. This is right everywhere."""

    def train(self) -> Any:
        x = torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1)[:, :CLASSES].argmax(1))

    def collate(self, items: Any) -> Any:
        x, labels = super().collate(items)
        first = 3 * torch.arange(len(x))  # (B,): the first node of each
        edges = torch.tensor([[0, 1, 2], [1, 2, 0]])  # a ring
        return {
            "x": x.flatten(0, 1),
            "edges": (edges[:, None] + first[:, None]).flatten(1),  # (2, 3·B)
            "owner": torch.arange(len(x)).repeat_interleave(3),
            "first": first,
        }, labels


class Classes(Task):
    """Right everywhere."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).sum()}


class OfDicts(Task):
    """Labels that lie in a list of dicts. This is right everywhere."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, torch.stack([known["label"] for known in target]))


# --- data with a mistake ---


class GlobalOrder(Numbers):
    """An order that ignores its generator."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(SAMPLES)


class SameOrder(Numbers):
    """One rank forgets that there is another epoch."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randperm(SAMPLES, generator=generator)
        return drawn.flip(0) if epoch and rank() else drawn


class Drawing(TensorDataset):
    """Items with noise from a generator of the data set's own."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.generator = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.generator.normal(0, 1e-3), y


class Drawn(Numbers):
    def train(self) -> Any:
        return Drawing(*super().train().tensors)


class Padded(Numbers):
    """Samples of some rows, padded to the longest of a batch: another length on each rank. Every twelfth has eight."""

    def train(self) -> Any:
        x, y = super().train().tensors
        return [(row.repeat(3 if at % 12 else 8, 1), label) for at, (row, label) in enumerate(zip(x, y, strict=True))]

    def collate(self, items: Any) -> Any:
        x, y = zip(*items, strict=True)
        return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(y)


# --- tasks with a mistake ---


class Summed(Classes):
    """It divides by the global batch, though it is asked for the mean over its own samples."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / 24


class ClassWeights(Classes):
    """Cross entropy with class weights, which divides by those of its own samples; Task.weight does not say so."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, torch.arange(1.0, 1 + CLASSES).to(output))


class Meaned(Classes):
    """A metric that is a mean, though sums are asked for."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).float().mean()}


class Counts(Classes):
    """It counts steps, where no checkpoint keeps it, and its loss depends on them."""

    done = 0

    def after_step(self, network: nn.Module, step: int) -> None:
        self.done += 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) * (1 + 0.5 * self.done)


# --- schedules and optimizers with a mistake ---


class Hearing(Schedule):
    """It counts evaluations, where no checkpoint keeps it."""

    heard = 0

    def at(self, step: int, epoch: int, progress: float) -> float:
        return 0.5**self.heard

    def observe(self, metrics: Mapping[str, float], best: str) -> None:
        self.heard += 1


class ScaledRate(torch.optim.SGD):
    """It multiplies its rate by the number of processes, as large batches would ask for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * size)
