"""The host's memory that offloaded activations take in a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from typing_extensions import override

from trainer.parallel.activation_offload import HostCopies


class CountedCopies(HostCopies):
    """Copies without values: in a trial the CPU stands for the device, and the meta device for the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = self._held = 0  # bytes

    @override
    def to_host(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        copies = [torch.empty_like(value, device="meta") for value in values]
        for copy in copies:
            self._held += copy.nbytes
            finalize(copy, self._release, copy.nbytes)
        self.peak = max(self.peak, self._held)
        return copies, None

    @override
    def to_device(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        return [torch.empty_like(copy, device=self._device) for copy in copies], None

    def _release(self, size: int) -> None:
        self._held -= size
