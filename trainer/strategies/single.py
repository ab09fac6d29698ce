"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from trainer.learning.task import Task
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel


@dataclass
class Single(Strategy):
    """One process on one device: what every other strategy must equal."""

    can_compile_steps: ClassVar[bool] = True

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        if not self.compiles_steps:
            return super().build(task, network, example)
        from trainer.strategies.compiled_step import CompiledStepModel  # torch.func imports the compiler

        return CompiledStepModel(self, task, network, example)
