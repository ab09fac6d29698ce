"""Tensor and context parallelism: layers or sequences are split over neighbouring ranks, by the network's plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from trainer.learning.task import Task
from trainer.strategies.multi_process import Meshed
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.sharded_model import ContextParallelModel


@dataclass
class TP(Meshed):
    """Each rank holds a shard of every large layer, or a part of every sequence; activations are sent in each layer.

    Degrees multiply to the processes: `replicate` copies, which average gradients, of `context` ranks, which read the
    same samples and a stretch of each sequence, of `tensor` ranks, over which one copy is split. DDP around split
    layers trains right but loses them from the state: not used here.
    """

    axis: ClassVar[str] = "tensor"
    replicate: int | None = 1  # copies of the network; None: what tensor leaves
    context: int | None = 1  # ranks that share samples by sequence; None: what the others leave
    tensor: int | None = None  # ranks that hold one copy, best on one machine; None: what the others leave

    @property
    @override
    def name(self) -> str:
        words = {"ddp": self.replicate, "cp": self.context, "tp": self.tensor}
        return "_".join(word for word, degree in words.items() if degree != 1) or "tp"

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return ContextParallelModel(self, task, network, example)
