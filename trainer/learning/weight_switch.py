"""Optimizers that train other weights than those to evaluate and to keep: which of both the network holds.

Schedule-free optimizers are such (A. Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682): `eval()` puts
the averaged weights into the network, `train()` those at which gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from trainer.learning.optimizer import trains_other_weights


class NoWeightSwitch:
    """For all other optimizers: the weights that they train are the ones to evaluate."""

    def use(self, training: bool) -> None:
        """Collective where ranks own parameters: the network holds the weights to train, or those to evaluate."""

    def loaded(self) -> None:
        """A checkpoint was read, whose weights are those to evaluate."""


class WeightSwitch(NoWeightSwitch):
    """Around an optimizer that has both."""

    def __init__(self, optimizer: Any, deliver: Callable[[], None]) -> None:
        """deliver: sends what this rank's optimizer has changed to the ranks that have copies."""
        self._optimizer, self._deliver, self._training = optimizer, deliver, True

    @override
    def use(self, training: bool) -> None:
        if training == self._training:
            return
        self._training = training
        # both ways by rounding alone: what goes on after a save is what a resumed run goes on with
        if training:
            self._optimizer.train()
        else:
            self._optimizer.eval()
        self._deliver()

    @override
    def loaded(self) -> None:
        self._training = False


def make_weight_switch(optimizer: Optimizer, deliver: Callable[[], None]) -> NoWeightSwitch:
    """The switch of this optimizer, which is in training."""
    return WeightSwitch(optimizer, deliver) if trains_other_weights(optimizer) else NoWeightSwitch()
