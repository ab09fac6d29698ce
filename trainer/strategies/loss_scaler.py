"""Loss scaling for fp16, and skipping the update of a step that is not finite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.parallel.buckets import make_buckets, pack, unpack
from trainer.parallel.device_mesh import to_local
from trainer.parallel.gradient_clipping import multiply_gradients_
from trainer.parallel.ranks import COMPLETED, Ranks, Waitable

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, INIT_SCALE = 2.0, 0.5, 2000, 65536.0  # torch.amp.GradScaler's defaults


class NoScaler:
    """For every precision but fp16: nothing is scaled, no step is left out."""

    needs_norm = False
    allowed = 0  # steps of a hundred that may be left out because they are not finite
    skipped: Tensor | float = 0.0  # 1 if the last step was left out

    def begin(self) -> None:
        """A step begins: nothing has changed yet."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def observe_loss(self, loss: Tensor) -> None:
        """Collective in `StepSkipper`: take this rank's part of the step's loss, after the backward."""

    def unscale_(self, parameters: list[Tensor]) -> None:
        """Undo the scale in the gradients."""

    def unscale_factor(self) -> float:
        """The factor of `unscale_`, as a number for people; may wait for the device."""
        return 1.0

    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Are the gradients finite, so that the optimizer is to be called?"""
        return True

    def overflow(self, norm: Tensor, broken: Tensor | float = 0.0) -> Tensor | float:
        """1 if the scale was too large for this step, else 0; `broken`: 1 if its loss was not finite."""
        return 0.0

    def loss_and_count(self, loss: Tensor) -> tuple[Tensor, Tensor | int]:
        """For a mean over steps: the loss of this step, and 1; zeros if it was left out."""
        return loss, 1

    def skipped_steps(self) -> int:
        """How many steps of the run were left out because they were not finite; may wait for the device."""
        return 0

    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        """The norm, if an infinite one is a fault; None: it is not (fp16), or there is no norm."""
        return norm

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state from a checkpoint."""


class Scaler(NoScaler):
    """Loss scaling without a device sync. An overflow on any rank shows in the global norm, which every rank knows.

    torch.amp.GradScaler is not used because it looks for overflows in local gradients only: ranks with different shards
    could disagree. Optimizers get `found_inf` through the same attribute as from GradScaler.
    """

    needs_norm = True

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        """ranks: the number of data ranks, by which the loss was multiplied, because gradients are averaged."""
        # divided by it again, the gradient of a sample is as large as in one process, and overflows like there
        self._ranks = ranks
        self._scale = torch.tensor(INIT_SCALE, device=device)
        self._good = torch.zeros((), device=device)  # steps since the last overflow or growth

    @override
    def scale(self, loss: Tensor) -> Tensor:
        return loss * (self._scale / self._ranks)

    @override
    def unscale_(self, parameters: list[Tensor]) -> None:
        multiply_gradients_([p.grad for p in parameters if p.grad is not None], self._ranks / self._scale)

    @override
    def unscale_factor(self) -> float:
        return self._ranks / float(self._scale)

    @override
    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Did no gradient overflow? An optimizer that takes `found_inf` is called anyway and decides on the device."""
        assert norm is not None, "fp16 decides by the norm"
        self.skipped = self.overflow(norm)
        return should_call_optimizer(self.skipped, optimizer)

    @override
    def overflow(self, norm: Tensor, broken: Tensor | float = 0.0) -> Tensor:
        """Halve the scale after an overflow, double it after many steps without one. Nothing waits for the device."""
        overflow = (~torch.isfinite(norm)).to(torch.float32) * (1 - broken)
        self._good = (self._good + 1 - broken) * (1 - overflow)
        # decided by tensors of shape () on the device: an `if` would make the host wait for the gradients
        grown = (self._good >= GROWTH_INTERVAL).to(torch.float32)
        self._scale = (
            self._scale * torch.where(overflow > 0, BACKOFF_FACTOR, 1.0) * torch.where(grown > 0, GROWTH_FACTOR, 1.0)
        )
        self._good = self._good * (1 - grown)
        return overflow

    @override
    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        """None: an overflow is no fault, it only shows that the scale is too large."""
        return None

    @override
    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: the scale, and the steps since it last changed."""
        return {"scaler/scale": self._scale, "scaler/good": self._good}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the scale; a checkpoint of another precision has none."""
        self._scale = state.get("scaler/scale", self._scale).to(self._scale.device)
        self._good = state.get("scaler/good", self._good).to(self._good.device)


def should_call_optimizer(left_out: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Is the optimizer to be called? left_out: 1 if its step is to be left out, else 0.

    A fused optimizer takes `found_inf`: it is always called, and decides on the device. For others the host waits.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.grad_scale, optimizer.found_inf = None, left_out  # type: ignore[attr-defined]
        return True
    # of a shape without values, as a plan has it, the usual answer
    return type(left_out) is not Tensor or not bool(left_out)


class StepSkipper(NoScaler):
    """A scaler around the scaler: a step has no effect if a loss or the gradient is not finite on any rank.

    Weights, the optimizer's state and the moving average stay as they were. So do buffers that the forward changes in
    place (BatchNorm's running statistics).
    """

    needs_norm = True
    allowed = 10

    def __init__(self, scaler: NoScaler, network: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._scaler, self._ranks = scaler, ranks
        # sorted by type, so that all of a type are copied as one
        buffers = sorted(map(to_local, network.buffers()), key=lambda x: (str(x.device), str(x.dtype)))
        self._buffers = make_buckets(buffers)
        self._before: list[Tensor] = []  # their values when the step began
        self._broken = torch.zeros((), device=device)  # 1 if the last step was left out
        self._pending: Waitable = COMPLETED
        self._count = torch.zeros((), device=device)  # steps left out so far

    @override
    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    @override
    def begin(self) -> None:
        """Copy the buffers, which the forward may change."""
        self._before = [pack(bucket) for bucket in self._buffers]

    @override
    def observe_loss(self, loss: Tensor) -> None:
        """Collective: begin to ask all ranks whether a loss is not finite; it travels while the norm is computed."""
        self._broken = (~torch.isfinite(loss)).to(torch.float32)
        self._pending = self._ranks.all_reduce_max_(self._broken)  # all ranks; one number

    @override
    def unscale_(self, parameters: list[Tensor]) -> None:
        self._scaler.unscale_(parameters)

    @override
    def unscale_factor(self) -> float:
        return self._scaler.unscale_factor()

    @override
    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Were all losses and the gradient finite? If not, buffers get their old values."""
        assert norm is not None, "the norm tells of gradients"
        self._pending.wait()
        # the norm is the same on every rank; in fp16 it may be infinite because the scale is too large
        if (checked := self._scaler.norm_to_check(norm)) is not None:
            self._broken = torch.maximum(self._broken, (~torch.isfinite(checked)).to(self._broken))
        self._count = self._count + self._broken
        self._restore()
        # a broken loss is no overflow: then the scale stays
        self.skipped = self._broken + self._scaler.overflow(norm, self._broken)
        return should_call_optimizer(self.skipped.to(norm.device), optimizer)

    @torch.no_grad()
    def _restore(self) -> None:
        """If the step is broken, give buffers their old values. Nothing waits for the device."""
        broken = self._broken > 0
        for bucket, before in zip(self._buffers, self._before, strict=True):
            chosen = torch.where(broken.to(before.device), before, pack(bucket))  # (N,): the bucket's tensors as one
            torch._foreach_copy_(bucket, unpack(chosen, bucket))

    @override
    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        return self._scaler.norm_to_check(norm)

    @override
    def loss_and_count(self, loss: Tensor) -> tuple[Tensor, Tensor | int]:
        """The loss, and 1; of a step that was left out zeros."""
        return torch.where(self._broken > 0, torch.zeros_like(loss), loss), 1 - self._broken

    @override
    def skipped_steps(self) -> int:
        return int(self._count)

    @override
    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: the scaler's, and how many steps were left out."""
        return {**self._scaler.state(), "scaler/left_out": self._count}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state; a checkpoint of a run without `on_nonfinite=skip` has no count."""
        self._scaler.load(state)
        self._count = state.get("scaler/left_out", self._count).to(self._count.device)
