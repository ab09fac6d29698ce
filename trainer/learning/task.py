"""What is being learned: the loss, its weight, and the figures that say how well."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.data.tree import first_tensor, named
from trainer.learning.plan import Plan


class Task:
    """What is being learned. Every method but `loss` has a default; nothing here knows about devices or processes.

    A task is called with micro-batches. `inputs` and `targets` are what the data set gave: a tensor, or nested dicts,
    tuples and lists of them, with the samples along the first dimension.
    """

    best: str = "-loss"  # the figure that marks the best checkpoint; a minus sign: smaller is better

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        """Compute the network's output for one micro-batch."""
        return network(inputs)

    def carry(self, output: Any) -> dict[str, Tensor]:
        """What passes to the next batch: of each row a state, by names; tensors (B, …). Default: nothing.

        A task that writes this has a forward with one more argument, `carried=None`: row i of the global batch gets
        what row i of the batch before has left, without its graph; None where an epoch or an evaluation begins.
        """
        return {}

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        """The mean loss over the units of this micro-batch, finite where there are none; a dict's parts are summed."""
        raise NotImplementedError(f"{type(self).__name__} must say what its loss is: def loss(self, output, target)")

    def weight(self, target: Any) -> Tensor | int:
        """How many units the mean of `loss` is over; default: samples.

        Weights may differ between micro-batches and ranks: those of a step are summed over all of them. The default is
        known everywhere and needs no communication.
        """
        return first_tensor(target).shape[0]  # (B, …)

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums over this micro-batch, tensors of any shape; they are added up over the whole evaluation set."""
        return {}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Turn the totals over the evaluation set into figures.

        `totals` holds `loss` (the sum of loss times weight), `weight`, `samples` and every sum of `metrics`. The
        default divides each by the weight; totals with more than one element need a task that says what they mean.
        """
        # A sum of several numbers has no one meaning; a set without samples has weight 0.
        sums = {
            name: total for name, total in totals.items() if name not in ("weight", "samples") and total.numel() == 1
        }
        return {name: float(total.double() / (totals["weight"] or 1)) for name, total in sums.items()}

    def predict(self, output: Any) -> dict[str, Tensor]:
        """What is to be kept of a network's answer, by names; the first dimension of each is the samples.

        The default is the answer itself: `output`; of a dict, a dataclass or a tuple its tensors, as `output.NAME`.
        """
        samples = first_tensor(output).shape[0]
        return {name: tensor for name, tensor in named(output, "output") if tensor.shape[:1] == (samples,)}

    def after_step(self, network: nn.Module, step: int) -> None:
        """Change the network in place after an optimizer step: elementwise, on what this rank holds, no gradient."""

    def plan(self, network: nn.Module) -> Plan:
        """How the network can be split: what its own `plan()` says, where it has one."""
        # The networks of others have no such method: any module will do.
        own = getattr(network, "plan", None)
        return own() if callable(own) else Plan()


def carries(task: Task) -> bool:
    """Does the task pass a state from batch to batch?"""
    return type(task).carry is not Task.carry
