"""This program over the same work, as its users bring it: a data set in memory, a task, a network in a lab folder.

`python -m trainer` does the rest. The clock is the lab's own: a hook that torch offers for all optimizers.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from scripts.benchmarks import work as shared
from trainer import Data, Task

WORK = shared.Work.asked()
CLOCK = shared.Clock(WORK.steps)


class Samples(Data):
    """The data of the workload."""

    def __init__(self) -> None:
        self.sets = [TensorDataset(*pair) for pair in shared.tensors(WORK)]

    def train(self) -> Any:
        """Shuffled anew in each epoch."""
        return self.sets[0]

    def evaluation(self) -> Any:
        """In order."""
        return self.sets[1]


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
        if CLOCK.over:
            CLOCK.report(math.ceil(totals["samples"] / (WORK.eval_batch * WORK.ranks)), figures["accuracy"])
        return figures


def network() -> nn.Module:
    """The network of the workload."""
    return shared.network(WORK)
