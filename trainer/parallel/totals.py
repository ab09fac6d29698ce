"""Sums over ranks that are started now and read later, so that neither the step nor the device waits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.ranks import Ranks


class Totals:
    """Sums on their way: added up over ranks, copied to the CPU, and only waited for when they are read.

    Whole numbers travel as int64 and wrap (digests), all others as float64; what lies on the CPU travels from there.
    """

    def __init__(
        self, sums: Mapping[str, Tensor], ranks: Ranks, device: torch.device, alike: Mapping[str, Tensor] | None = None
    ) -> None:
        """`alike`: numbers that are equal on all ranks already, to be read at the same time."""
        self._alike = {name: value.to("cpu", non_blocking=True) for name, value in (alike or {}).items()}
        self._parcels = [_Parcel(part, ranks) for part in _sorted(sums)]
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def read(self) -> dict[str, Tensor]:
        """The totals, as CPU tensors of the shapes that were given."""
        if self._ready is not None:
            self._ready.synchronize()
        totals = dict(self._alike)
        for parcel in self._parcels:
            totals |= parcel.open()
        return totals


class _Parcel:
    """Sums of one type on one device, as one tensor."""

    def __init__(self, sums: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._shapes = {name: value.shape for name, value in sums.items()}
        packed = torch.cat([wide(value.detach()).reshape(-1) for value in sums.values()])
        self._work = ranks.all_reduce_sum_(packed)  # the given ranks; 8 bytes a number
        if packed.device.type != "cpu":
            self._work.wait()  # of a GPU only the stream waits, so that the copy comes after the sum
        self._packed = packed.to("cpu", non_blocking=True)

    def open(self) -> dict[str, Tensor]:
        self._work.wait()
        parts = self._packed.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def wide(value: Tensor) -> Tensor:
    """A number in the type in which numbers are added up: int64 if it is whole, else float64."""
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def _sorted(sums: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The sums by type and device, in an order that is the same on every rank."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name in sorted(sums):
        groups.setdefault((str(sums[name].is_floating_point()), sums[name].device.type), {})[name] = sums[name]
    return [groups[key] for key in sorted(groups)]
