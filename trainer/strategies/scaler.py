"""Loss scaling for fp16: small gradients survive, and a step with an overflow is left out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.clip import multiply_

GROWTH, BACKOFF, PATIENCE, START = 2.0, 0.5, 2000, 65536.0  # torch.amp.GradScaler's defaults


class NoScaler:
    """Every precision but fp16: nothing is scaled, no step is left out."""

    needs_norm = False
    skipped: Tensor | float = 0.0  # 1 where the last step was left out

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def unscale_(self, parameters: list[Tensor]) -> None:
        """Undo the scale in the gradients."""

    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Are the gradients fit to update the weights?"""
        return True

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class Scaler(NoScaler):
    """Loss scaling without a device sync. An overflow on any rank shows in the global norm, which every rank knows.

    Own code because torch.amp.GradScaler looks for overflows in local gradients only, so that ranks holding different
    shards would disagree. Optimizers that take `found_inf` (the fused ones, through the attribute by which GradScaler
    hands it over) skip the step on the device; for others the flag is read, which waits.
    """

    needs_norm = True

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.tensor(START, device=device)
        self._good = torch.zeros((), device=device)  # steps since the last overflow or growth

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(self, parameters: list[Tensor]) -> None:
        multiply_([p.grad for p in parameters if p.grad is not None], 1.0 / self._scale)

    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Did no gradient overflow? An optimizer that takes `found_inf` is called anyway and decides on the device."""
        assert norm is not None, "fp16 decides by the norm"
        overflow = self.skipped = (~torch.isfinite(norm)).to(torch.float32)
        self._adapt(overflow)
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.grad_scale, optimizer.found_inf = None, overflow  # type: ignore[attr-defined]
            return True
        return not bool(overflow)  # waits for the device

    def _adapt(self, overflow: Tensor) -> None:
        """Halve the scale after an overflow, double it after many steps without one; nothing here waits."""
        self._good = (self._good + 1) * (1 - overflow)
        grown = (self._good >= PATIENCE).to(torch.float32)
        self._scale = self._scale * torch.where(overflow > 0, BACKOFF, 1.0) * torch.where(grown > 0, GROWTH, 1.0)
        self._good = self._good * (1 - grown)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores: the scale and the steps since it last changed."""
        return {"scaler/scale": self._scale, "scaler/good": self._good}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; a checkpoint of another precision has none."""
        self._scale = state.get("scaler/scale", self._scale).to(self._scale.device)
        self._good = state.get("scaler/good", self._good).to(self._good.device)
