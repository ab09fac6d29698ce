"""Sums over ranks that are started now and read later, so that neither the step nor the device waits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks


class Totals:
    """Sums on their way: added up over ranks, copied to the CPU, and only waited for when they are read.

    Whole numbers travel as int64 and wrap (digests), all others as float64.
    """

    def __init__(
        self, sums: Mapping[str, Tensor], ranks: Ranks, device: torch.device, alike: Mapping[str, Tensor] | None = None
    ) -> None:
        """`alike`: numbers that are equal on all ranks already, to be read at the same time."""
        self._alike = {name: value.to("cpu", non_blocking=True) for name, value in (alike or {}).items()}
        self._shapes: dict[str, torch.Size] = {}
        self._names: dict[torch.dtype, list[str]] = {torch.int64: [], torch.float64: []}
        for name in sorted(sums):  # the same order on every rank
            self._shapes[name] = sums[name].shape
            self._names[torch.float64 if sums[name].is_floating_point() else torch.int64].append(name)
        self._packed: dict[torch.dtype, Tensor] = {}
        for dtype, names in self._names.items():
            if names:
                packed = torch.cat([sums[name].detach().reshape(-1).to(device, dtype) for name in names])
                ranks.sum_(packed).wait()  # the given ranks; 8 bytes a number. On a GPU this waits on the stream only
                self._packed[dtype] = packed.to("cpu", non_blocking=True)
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def read(self) -> dict[str, Tensor]:
        """The totals, as CPU tensors of the shapes that were given."""
        if self._ready is not None:
            self._ready.synchronize()
        totals = dict(self._alike)
        for dtype, packed in self._packed.items():
            sizes = [self._shapes[name].numel() for name in self._names[dtype]]
            for name, part in zip(self._names[dtype], packed.split(sizes), strict=True):
                totals[name] = part.reshape(self._shapes[name])
        return totals
