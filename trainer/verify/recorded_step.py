"""What an optimizer gets in a step, and what it makes of it, before anybody else comes to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.verify.training_record import CLIPPED, RATE, STEP, Key, Record, Signing

_HOW = ("fused", "foreach", "capturable", "differentiable")  # say how it is computed, not what


class Stepping:
    """Around a step: the rates, the gradient and the new value of each parameter that this rank's optimizer has.

    Collective where ranks hold shards, as the step itself is. They are in the record when the context ends.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, record: Record, step: int) -> None:
        self._names = {parameter: name for name, parameter in network.named_parameters()}
        self._optimizer, self._signing, self._step = optimizer, Signing(record), step

    def __enter__(self) -> Self:
        before = self._optimizer.register_step_pre_hook(self._before)
        self._hooks = before, self._optimizer.register_step_post_hook(self._after)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is None:
            self._signing.join()

    def _before(self, *given: Any) -> None:
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        for name, parameter, _ in self._owned():
            self._hear(RATE, name, torch.tensor(_numbers(groups[parameter]), dtype=torch.float64))
        for name, _, gradient in self._owned():
            self._hear(CLIPPED, name, gradient)

    def _after(self, *given: Any) -> None:
        for name, parameter, _ in self._owned():
            self._hear(STEP, name, parameter)

    def _hear(self, phase: str, name: str, tensor: Tensor) -> None:
        self._signing.add(Key(self._step, phase, name), tensor)

    def _owned(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """What this rank's optimizer steps, with its gradient; the last layer first, as gradients come."""
        owned = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        for parameter, name in reversed(self._names.items()):
            if parameter in owned and parameter.grad is not None:
                yield name, parameter, parameter.grad


def _numbers(group: dict[str, Any]) -> list[float]:
    """The numbers of a group by which its parameters are stepped: rate, decay, momentum."""
    values = (group[key] for key in sorted(group) if key != "params" and key not in _HOW)
    several = (value if isinstance(value, tuple | list) else [value] for value in values)
    return [float(each) for value in several for each in value if isinstance(each, int | float | Tensor)]
