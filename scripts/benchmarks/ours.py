"""This program over the same work, as its users bring it: a data set in memory, a task, a network in a lab folder.

`python -m trainer` does the rest. The clock is the lab's own: a hook that torch offers for all optimizers.
"""

import math
from typing import Any

from torch import Tensor, nn

from scripts.benchmarks import work as shared
from scripts.benchmarks.clock import Clock
from trainer import Data, Task

WORK, CLOCK = shared.Work.asked(), Clock()


class Rows:
    """Samples in memory, whole batches at once."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The samples of these indices."""
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)


class Samples(Data):
    """The data of the workload."""

    def __init__(self) -> None:
        if WORK.name == "fmnist":
            self.sets = [Rows(each.data[:, None], each.targets) for each in shared.fashion_mnist()]
        else:
            self.sets = [Rows(*pair) for pair in shared.tensors(WORK)]

    def train(self) -> Any:
        """Shuffled anew in each epoch."""
        return self.sets[0]

    def evaluation(self) -> Any:
        """In order."""
        return self.sets[1]

    def augment(self, inputs: Tensor, targets: Tensor, random: Any, training: bool) -> tuple[Tensor, Tensor]:
        """Pictures of bytes become numbers up to 1, as ToTensor makes them."""
        return (inputs if inputs.is_floating_point() or inputs.dim() < 4 else inputs.float() / 255), targets


class Classes(Task):
    """Cross entropy and accuracy; the last evaluation leaves the clock's figures."""

    best = "accuracy"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Over classes or tokens."""
        return shared.loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """How many are right, and of how many."""
        right = output.argmax(-1) == target
        return {"accuracy": right.flatten(1).double().mean(1).sum() if right.dim() > 1 else right.sum()}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Shares; an evaluation before the last step is the rehearsal and is not measured."""
        figures = super().finish(totals)
        if CLOCK.steps == WORK.steps:
            batches = math.ceil(totals["samples"] / (WORK.eval_batch * WORK.ranks))
            CLOCK.report(WORK.steps, batches, figures["accuracy"])
        return figures


def network() -> nn.Module:
    """The network of the workload."""
    return shared.network(WORK)
