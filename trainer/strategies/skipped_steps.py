"""Leaving out the update of a step that is not finite: all ranks decide the same, where the numbers are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.parallel.buckets import buckets, packed, unpacked
from trainer.parallel.local_shard import held
from trainer.parallel.ranks import DONE, Ranks, Waitable
from trainer.strategies.carried_state import NothingCarried
from trainer.strategies.loss_scaler import NoScaler, steps_unless


class Skipping(NoScaler):
    """A scaler, and a step without effect where a loss or the gradient is not finite on any rank.

    Weights, the optimizer's memory and the moving average stay as they were, and so do buffers that the forward has
    moved in place (BatchNorm's running statistics) and what passes from batch to batch.
    """

    needs_norm = True
    allowed = 10

    def __init__(
        self, scaler: NoScaler, network: nn.Module, carried: NothingCarried, ranks: Ranks, device: torch.device
    ) -> None:
        self._scaler, self._carried, self._ranks = scaler, carried, ranks
        # by type, so that all of a type are copied as one
        own = sorted((held(buffer) for buffer in network.buffers()), key=lambda one: (str(one.device), str(one.dtype)))
        self._buffers = buckets(own)
        self._before: list[Tensor] = []  # what was in them as the step began
        self._broken = torch.zeros((), device=device)  # 1 where the last step was left out
        self._under_way: Waitable = DONE
        self._count = torch.zeros((), device=device)  # steps left out so far

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def begin(self) -> None:
        """Keep what the forward may move."""
        self._before = [packed(bucket) for bucket in self._buffers]

    def hear(self, loss: Tensor) -> None:
        """Collective: ask whether any rank's loss is not finite, while the norm is computed."""
        self._broken = (~torch.isfinite(loss)).to(torch.float32)
        self._under_way = self._ranks.all_reduce_max_(self._broken)  # all ranks; one number

    def unscale_(self, parameters: list[Tensor]) -> None:
        self._scaler.unscale_(parameters)

    def unscaled(self) -> float:
        return self._scaler.unscaled()

    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Was all of it finite? Where not, what the forward has moved is put back."""
        assert norm is not None, "the norm tells of gradients"
        self._under_way.wait()
        # the norm is the same on every rank; of an fp16 step it may be infinite because the scale is too large
        if (judged := self._scaler.judged(norm)) is not None:
            self._broken = torch.maximum(self._broken, (~torch.isfinite(judged)).to(self._broken))
        self._count = self._count + self._broken
        self._put_back()
        self.skipped = self._broken + self._scaler.overflow(norm, self._broken)
        return steps_unless(self.skipped.to(norm.device), optimizer)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Give buffers and what passes on their numbers from before, if the step is broken; nothing here waits."""
        broken = self._broken > 0
        for bucket, before in zip(self._buffers, self._before, strict=True):
            chosen = torch.where(broken.to(before.device), before, packed(bucket))
            torch._foreach_copy_(bucket, unpacked(chosen, bucket))
        self._carried.put_back(broken)

    def judged(self, norm: Tensor | None) -> Tensor | None:
        return self._scaler.judged(norm)

    def counted(self, loss: Tensor) -> tuple[Tensor, Tensor | int]:
        """The loss of one step; of a step that was left out nothing, of none."""
        return torch.where(self._broken > 0, torch.zeros_like(loss), loss), 1 - self._broken

    def left_out(self) -> int:
        """How many steps of the run were left out; waits for the device."""
        return int(self._count)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores: the scaler's, and how many steps were left out."""
        return {**self._scaler.state(), "scaler/left_out": self._count}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; a checkpoint of a run that left none out has none."""
        self._scaler.load(state)
        self._count = state.get("scaler/left_out", self._count).to(self._count.device)
