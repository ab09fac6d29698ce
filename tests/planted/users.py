"""Tasks, data, schedules and optimizers with a mistake each, as users make them, and the right ones beside them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from recipes.language.next_token import NextToken
from tests.planted.networks import CLASSES, WIDTH, Net, rank
from trainer import Data, Schedule, Task, gather

SAMPLES = 96


class ScaledRate(torch.optim.SGD):
    """It multiplies its rate by the number of processes, as large batches would ask for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * size)


class Remembering(Schedule):
    """It counts how often it is asked, where no checkpoint keeps it."""

    asked = 0

    def at(self, step: int, epoch: int, progress: float) -> float:
        self.asked += 1
        return 1.0 / self.asked


class Numbers(Data):
    """Right everywhere."""

    def train(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def evaluation(self) -> Any:
        return self.train()


class Counting(TensorDataset):
    """An item depends on how many this process has read before it."""

    read = itertools.count()

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 1e-3 * (next(self.read) % 7), y


class Counted(Numbers):
    def train(self) -> Any:
        return Counting(*super().train().tensors)


class Recalling(Numbers):
    """What it does to a batch depends on how many came before."""

    batches = 0

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        self.batches += training
        return inputs * (1 + 1e-3 * self.batches), targets


class SameOrder(Numbers):
    """One rank forgets that there is another epoch."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randperm(SAMPLES, generator=generator)
        return drawn.flip(0) if epoch and rank() else drawn


class Scaled(Numbers):
    """A batch is divided by its largest number."""

    def collate(self, items: Any) -> Any:
        x, y = super().collate(items)
        return x / x.abs().max(), y


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


class Rows(Dataset[Any]):
    """Samples of three to six rows, and what is known of each: a dict, in which not all have the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.randn(3 + index % 4, WIDTH, generator=torch.Generator().manual_seed(index))
        known = {"label": rows.sum(0)[:CLASSES].argmax(), "first": rows[0]}
        return rows, known | ({"odd": rows[1]} if index % 2 else {})


class Listed(Numbers):
    """A batch as torchvision's detection has it: a list of samples, a list of dicts. This is right everywhere."""

    def train(self) -> Any:
        return Rows()

    def collate(self, items: Any) -> Any:
        return tuple(zip(*items, strict=True))


class Read(Listed):
    """A batch in which each sample is what it is times its place among those of its rank."""

    def collate(self, items: Any) -> Any:
        inputs, targets = super().collate(items)
        return tuple(x * (1 + 1e-3 * at) for at, x in enumerate(inputs)), targets


class Padded(Numbers):
    """Samples of some rows, padded to the longest of a batch: another length on each rank. Every twelfth has eight."""

    def train(self) -> Any:
        x, y = super().train().tensors
        return [(row.repeat(3 if at % 12 else 8, 1), label) for at, (row, label) in enumerate(zip(x, y, strict=True))]

    def collate(self, items: Any) -> Any:
        x, y = zip(*items, strict=True)
        return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(y)


class OfPadded(Net):
    """The mean over the rows of a sample, padded ones among them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class InDict(Listed):
    """The same, as a dict of lists."""

    def collate(self, items: Any) -> Any:
        inputs, targets = super().collate(items)
        return {"rows": list(inputs), "first": [known["first"] for known in targets]}, targets


class OfRows(Net):
    """The mean of what it computes of each row of a sample."""

    def forward(self, x: Any) -> Tensor:
        return torch.stack(
            [super(OfRows, self).forward(rows).mean(0) for rows in (x if type(x) is tuple else x["rows"])]
        )


class OfDicts(Task):
    """Labels that lie in a list of dicts."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, torch.stack([known["label"] for known in target]))


class Triples(Numbers):
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


class OfNodes(Net):
    """What each node hears of another one, and the mean of each graph."""

    def forward(self, graph: Any) -> Tensor:
        source, target = graph["edges"]
        y = super().forward(graph["x"] + torch.zeros_like(graph["x"]).index_add(0, target, graph["x"][source]))
        return y.new_zeros(len(graph["first"]), CLASSES).index_add(0, graph["owner"], y)


class Classes(Task):
    """Right everywhere."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).sum()}


class Summed(Classes):
    """It divides by the global batch, though it is asked for the mean over its own samples."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / 24


class ClassWeights(Classes):
    """Cross entropy with class weights, which divides by those of its own samples; Task.weight does not say so."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, torch.arange(1.0, 1 + CLASSES).to(output))


class Negatives(Classes):
    """Each sample against those of its micro-batch, as code for one GPU has it, without trainer.gather."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))


class Meaned(Classes):
    """A metric that is a mean, though sums are asked for."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).float().mean()}


class OwnDecay(Classes):
    """It changes a weight after each step, on each rank in another way."""

    def after_step(self, network: nn.Module, step: int) -> None:
        network.get_parameter("middle.weight").mul_(1 - 1e-3 * rank())


class Counts(Classes):
    """It counts steps, where no checkpoint keeps it, and its loss depends on them."""

    done = 0

    def after_step(self, network: nn.Module, step: int) -> None:
        self.done += 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) * (1 + 0.5 * self.done)


class LastDecay(Classes):
    """One rank changes a weight a little, after the last step of a proof."""

    def __init__(self, name: str = "middle.weight") -> None:
        self.name = name

    def after_step(self, network: nn.Module, step: int) -> None:
        if step == 3:
            network.get_parameter(self.name).mul_(1 - 1e-5 * rank())


class OwnMeter(Classes):
    """It adds up by itself, which knows one rank's samples alone."""

    right = count = 0

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.right, self.count = self.right + int((output.argmax(1) == target).sum()), self.count + len(target)
        return {}

    def finish(self, totals: dict[str, Any]) -> dict[str, float]:
        accuracy = self.right / self.count
        self.right = self.count = 0
        return {"accuracy": accuracy}


class LateMetric(Classes):
    """A metric that one rank gets wrong from its third batch on."""

    batches = 0

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.batches += 1
        return {"accuracy": (output.argmax(1) == target).sum() + (rank() if self.batches > 2 else 0)}


class Weighted(Classes):
    """The mean over samples that weigh differently. This is right everywhere."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target, reduction="none") * (1 + target)
        return each.sum() / self.weight(target)

    def weight(self, target: Tensor) -> Tensor:
        return (1 + target).sum()


class Contrast(Classes):
    """Each sample against the mean of all ranks' samples. This is right everywhere."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        apart = (output - gather(output).mean(0)).square().sum(1)
        return super().loss(output, target) + apart.log1p().mean()


class Ranked(Classes):
    """A metric that needs the samples of the whole set, in their order. This is right everywhere."""

    def gathered(self, output: Tensor, target: Tensor) -> dict[str, Tensor | list[Any]]:
        return {"scores": output[:, 0]}

    def finish(self, totals: dict[str, Any]) -> dict[str, float]:
        scores = totals.pop("scores").double()
        return {**super().finish(totals), "slope": float(scores @ torch.linspace(-1, 1, len(scores)).double())}


class Tokens(NextToken):
    """The next token, as a lab that imports this package. This is right everywhere."""


class Odd(Numbers):
    """An evaluation set whose last batch is one sample: a rank may have none of it. This is right everywhere."""

    def evaluation(self) -> Any:
        return TensorDataset(*self.train()[:49])


class Even(Schedule):
    """The full rate throughout. This is right everywhere."""

    def at(self, step: int, epoch: int, progress: float) -> float:
        return 1.0
