"""How much of what the devices could compute the steps of a run do: model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.data.nested_tensors import first_tensor


class NoUtilization:
    """Nobody has counted what a step computes."""

    def figures(self, inputs: Any, seconds: float) -> dict[str, float]:
        """What a training line says of it. inputs: of a micro-batch of the last step; seconds: of a step."""
        return {}


class Utilization(NoUtilization):
    """The operations of a step of the whole network, beside the most that all devices together can do.

    Chowdhery et al. 2022, arXiv:2204.02311, appendix B: forward and backward count, what is computed again does not.
    """

    def __init__(self, flops: float, peak: float, inputs: Any, say: Callable[[str], None]) -> None:
        """flops: of a step; peak: a second; inputs: such as the step was counted with; say: tells a sentence."""
        self._flops, self._peak, self._say = flops, peak, say
        self._counted = first_tensor(inputs).shape[1:]  # of a sample

    def figures(self, inputs: Any, seconds: float) -> dict[str, float]:
        """The utilisation, 0 to 1; from the first samples of another size on nothing, for those were not counted."""
        if self._peak and first_tensor(inputs).shape[1:] != self._counted:
            self._peak = 0.0
            self._say("note        no utilisation from here on: the samples are not all of one size")
        return {"utilisation": self._flops / seconds / self._peak} if self._peak else {}
