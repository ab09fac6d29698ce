"""A network whose ranks may share samples by sequence: each of them learns from its own stretch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.learning.parallel_plan import Plan
from trainer.learning.task import Task
from trainer.parallel.buckets import added
from trainer.parallel.ranks import Ranks
from trainer.parallel.sequence_pieces import Pieces, pieces
from trainer.parallel.sequence_shard import cut_sequences, most_pieces, stretch, tokens
from trainer.strategies.loss import Forward
from trainer.strategies.sharded_model import PlacedTensor


class PlacedContext(PlacedTensor):
    """A network that ranks may hold shards of, and whose sequences are cut over the context ranks, if there are any.

    Nobody above knows of stretches: batches come whole, and the sums that go back are those of whole sequences.
    """

    def _split(self, network: nn.Module, plan: Plan) -> None:
        super()._split(network, plan)
        cut_sequences(network, plan, self.strategy.context_group, self.strategy.device.type)

    def stretches(self, tokens: int) -> tuple[Ranks, Pieces]:
        ranks = self.strategy.context_group
        return ranks, pieces(ranks.rank, ranks.size, tokens // ranks.size, most_pieces(self._plan))

    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """The base's, of this rank's stretches; the sums are those of all context ranks, on each of them."""
        ranks = self.strategy.context_group
        own = [self._stretch(batch) for batch in batches]
        return added(super().forward_backward(own, step), ranks, self.strategy.device)

    def _stretch(self, batch: Any) -> Any:
        ranks = self.strategy.context_group
        inputs, targets = stretch((batch.inputs, batch.targets), ranks, most_pieces(self._plan))
        # every context rank weighs its own stretches, so of the global batch there are as many more of them
        return batch._replace(inputs=inputs, targets=targets, total=batch.total * ranks.size)

    def _losses(self, forward: Forward, inputs: Any, targets: Any) -> dict[str, Tensor]:
        self._chance.cut(self.strategy.context_group, tokens(inputs), most_pieces(self._plan))
        return super()._losses(forward, inputs, targets)

    def _evaluate(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        ranks = self.strategy.context_group
        own = stretch((inputs, targets), ranks, most_pieces(self._plan))
        self._chance.cut(ranks, tokens(own), most_pieces(self._plan))
        sums = super()._evaluate(batch, *own)
        if ranks.size == 1:
            return sums
        totals = added(sums, ranks, self.strategy.device)
        # every context rank has counted each sample, and its loss by it where samples are what a loss is the mean of
        often = ("samples", "weight", "loss") if type(self.task).weight is Task.weight else ("samples",)
        return totals | {name: totals[name] / ranks.size for name in often}
