"""Loss scaling for fp16, and leaving out the update of a step that is not finite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.parallel.buckets import make_buckets, pack, unpack
from trainer.parallel.device_mesh import to_local
from trainer.parallel.gradient_clipping import multiply_gradients_
from trainer.parallel.ranks import COMPLETED, Ranks, Waitable
from trainer.strategies.recurrent_state import NoRecurrentState

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, INIT_SCALE = 2.0, 0.5, 2000, 65536.0  # torch.amp.GradScaler's defaults


class NoScaler:
    """Every precision but fp16: nothing is scaled, no step is left out."""

    needs_norm = False
    allowed = 0  # steps of a hundred that may be left out because they are not finite
    skipped: Tensor | float = 0.0  # 1 where the last step was left out

    def begin(self) -> None:
        """A step begins: nothing has been moved yet."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def observe_loss(self, loss: Tensor) -> None:
        """Collective where it matters: this rank's share of the step's loss, with all gradients computed."""

    def unscale_(self, parameters: list[Tensor]) -> None:
        """Undo the scale in the gradients."""

    def unscale_factor(self) -> float:
        """What `unscale_` would multiply the gradients by, as a number for people; may wait for the device."""
        return 1.0

    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Are the gradients fit to update the weights?"""
        return True

    def overflow(self, norm: Tensor, broken: Tensor | float = 0.0) -> Tensor | float:
        """1 where the scale was too large for the step just done, else 0; `broken`: 1 where its loss was no number."""
        return 0.0

    def loss_and_count(self, loss: Tensor) -> tuple[Tensor, Tensor | int]:
        """What a mean over steps takes of the step just done: its loss, and how many steps that is."""
        return loss, 1

    def skipped_steps(self) -> int:
        """How many steps of the run were left out because they were not finite; may wait for the device."""
        return 0

    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        """The norm, where one that is not finite is a fault; None: it is not, or nobody has asked for it."""
        return norm

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class Scaler(NoScaler):
    """Loss scaling without a device sync. An overflow on any rank shows in the global norm, which every rank knows.

    Own code because torch.amp.GradScaler looks for overflows in local gradients only, so that ranks holding different
    shards would disagree. Optimizers get `found_inf` through the attribute by which GradScaler hands it over.
    """

    needs_norm = True

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        """ranks: by which number of data ranks the loss was multiplied, because they average what they have."""
        # inside a backward a sample's gradient is then as large as in one process, and overflows where it would there
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
        """Halve the scale after an overflow, double it after many steps without one; nothing here waits."""
        overflow = (~torch.isfinite(norm)).to(torch.float32) * (1 - broken)
        self._good = (self._good + 1 - broken) * (1 - overflow)
        grown = (self._good >= GROWTH_INTERVAL).to(torch.float32)
        self._scale = (
            self._scale * torch.where(overflow > 0, BACKOFF_FACTOR, 1.0) * torch.where(grown > 0, GROWTH_FACTOR, 1.0)
        )
        self._good = self._good * (1 - grown)
        return overflow

    @override
    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        """None: overflows are how a scale that fits is found."""
        return None

    @override
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores: the scale and the steps since it last changed."""
        return {"scaler/scale": self._scale, "scaler/good": self._good}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; a checkpoint of another precision has none."""
        self._scale = state.get("scaler/scale", self._scale).to(self._scale.device)
        self._good = state.get("scaler/good", self._good).to(self._good.device)


def should_call_optimizer(left_out: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Is the optimizer to be called, where 1 says that its step is left out, 0 that it is not?

    One that takes `found_inf` is called anyway and decides on the device; for others the host waits for the answer.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.grad_scale, optimizer.found_inf = None, left_out  # type: ignore[attr-defined]
        return True
    return not bool(left_out)


class StepSkipper(NoScaler):
    """A scaler, and a step without effect where a loss or the gradient is not finite on any rank.

    Weights, the optimizer's memory and the moving average stay as they were, and so do buffers that the forward has
    moved in place (BatchNorm's running statistics) and what passes from batch to batch.
    """

    needs_norm = True
    allowed = 10

    def __init__(
        self, scaler: NoScaler, network: nn.Module, carried: NoRecurrentState, ranks: Ranks, device: torch.device
    ) -> None:
        self._scaler, self._carried, self._ranks = scaler, carried, ranks
        # by type, so that all of a type are copied as one
        own = sorted(
            (to_local(buffer) for buffer in network.buffers()), key=lambda one: (str(one.device), str(one.dtype))
        )
        self._buffers = make_buckets(own)
        self._before: list[Tensor] = []  # what was in them as the step began
        self._broken = torch.zeros((), device=device)  # 1 where the last step was left out
        self._under_way: Waitable = COMPLETED
        self._count = torch.zeros((), device=device)  # steps left out so far

    @override
    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    @override
    def begin(self) -> None:
        """Keep what the forward may move."""
        self._before = [pack(bucket) for bucket in self._buffers]

    @override
    def observe_loss(self, loss: Tensor) -> None:
        """Collective: ask whether any rank's loss is not finite, while the norm is computed."""
        self._broken = (~torch.isfinite(loss)).to(torch.float32)
        self._under_way = self._ranks.all_reduce_max_(self._broken)  # all ranks; one number

    @override
    def unscale_(self, parameters: list[Tensor]) -> None:
        self._scaler.unscale_(parameters)

    @override
    def unscale_factor(self) -> float:
        return self._scaler.unscale_factor()

    @override
    def allows_step(self, optimizer: torch.optim.Optimizer, norm: Tensor | None) -> bool:
        """Was all of it finite? Where not, what the forward has moved is put back."""
        assert norm is not None, "the norm tells of gradients"
        self._under_way.wait()
        # the norm is the same on every rank; of an fp16 step it may be infinite because the scale is too large
        if (judged := self._scaler.norm_to_check(norm)) is not None:
            self._broken = torch.maximum(self._broken, (~torch.isfinite(judged)).to(self._broken))
        self._count = self._count + self._broken
        self._put_back()
        self.skipped = self._broken + self._scaler.overflow(norm, self._broken)
        return should_call_optimizer(self.skipped.to(norm.device), optimizer)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Give buffers and what passes on their numbers from before, if the step is broken; nothing here waits."""
        broken = self._broken > 0
        for bucket, before in zip(self._buffers, self._before, strict=True):
            chosen = torch.where(broken.to(before.device), before, pack(bucket))
            torch._foreach_copy_(bucket, unpack(chosen, bucket))
        self._carried.undo_step(broken)

    @override
    def norm_to_check(self, norm: Tensor | None) -> Tensor | None:
        return self._scaler.norm_to_check(norm)

    @override
    def loss_and_count(self, loss: Tensor) -> tuple[Tensor, Tensor | int]:
        """The loss of one step; of a step that was left out nothing, of none."""
        return torch.where(self._broken > 0, torch.zeros_like(loss), loss), 1 - self._broken

    @override
    def skipped_steps(self) -> int:
        return int(self._count)

    @override
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores: the scaler's, and how many steps were left out."""
        return {**self._scaler.state(), "scaler/left_out": self._count}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; a checkpoint of a run that left none out has none."""
        self._scaler.load(state)
        self._count = state.get("scaler/left_out", self._count).to(self._count.device)
