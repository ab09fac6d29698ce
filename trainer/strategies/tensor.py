"""Layers split over neighbouring ranks, by the plan that the network brings; one copy of it, or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from trainer.learning.task import Task
from trainer.strategies.joined import Meshed
from trainer.strategies.placed import Placed
from trainer.strategies.placed_tensor import PlacedTensor


@dataclass
class TP(Meshed):
    """Each rank holds a shard of every large layer; activations travel in every layer.

    Degrees multiply to the processes: `replicate` copies, which average gradients, each split over `tensor` ranks,
    which read the same samples. DDP around split layers trains right but loses them from the state: not used here.
    """

    axis: ClassVar[str] = "tensor"
    replicate: int | None = 1  # copies of the network; None: what tensor leaves
    tensor: int | None = None  # ranks that hold one copy, best on one machine; None: what replicate leaves

    @property
    def name(self) -> str:
        """The word for these degrees."""
        return "tp" if self.replicate == 1 else "ddp_tp"

    def build(self, task: Task, network: nn.Module, example: Any) -> Placed:
        """Collective: put this rank's shards of a network here."""
        return PlacedTensor(self, task, network, example)
