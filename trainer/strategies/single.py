"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel


@dataclass
class Single(Strategy):
    """One process on one device: what every other strategy must equal."""

    @override
    def refuse_compile(self, micro_batches: int) -> None:
        """Refuse what a step that is one graph cannot do."""
        if not self._is_one_graph:
            return
        if micro_batches > 1:
            raise Refusal(
                f"compile.mode=step and loop.micro_batches={micro_batches}: a graph has one micro-batch; use 1"
            )
        if self.activation_checkpointing != "none" or self.machine.resolved_precision == "fp16":
            raise Refusal(
                "compile.mode=step goes with neither activation_checkpointing nor precision=fp16; use default"
            )

    @property
    def _is_one_graph(self) -> bool:
        return self.machine.compile is not None and self.machine.compile.mode == "step"

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        if not self._is_one_graph:
            return super().build(task, network, example)
        from trainer.strategies.compiled_step import CompiledStepModel  # torch.func imports the compiler

        return CompiledStepModel(self, task, network, example)
