"""Sums over ranks that are started now and read later, so that neither the step nor the device waits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.buckets import buckets, packed, unpacked
from trainer.parallel.ranks import Ranks, Waitable

Sums = Mapping[str, Tensor | float]  # numbers that the host knows need no device


class Totals:
    """Sums on their way: added up over ranks, copied to the CPU, and only waited for when they are read.

    Whole numbers travel as int64 and wrap (digests), all others as float64; what lies on the CPU travels from there.
    """

    def __init__(
        self, sums: Sums, ranks: Ranks, device: torch.device, alike: Mapping[str, Tensor] | None = None
    ) -> None:
        """`alike`: numbers that are equal on all ranks already, to be read at the same time."""
        self._alike = {name: value.to("cpu", non_blocking=True) for name, value in (alike or {}).items()}
        # one message for each type and device, in an order that is the same on every rank
        own = {name: wide(value).detach() for name, value in sums.items()}
        self._names = sorted(own, key=lambda name: (own[name].is_floating_point(), own[name].device.type, name))
        self._under_way: list[tuple[list[Tensor], Tensor, Waitable]] = []
        for bucket in buckets([own[name] for name in self._names]):
            flat = packed(bucket)
            work = ranks.all_reduce_sum_(flat)  # the given ranks; 8 bytes a number
            if flat.device.type != "cpu":
                work.wait()  # of a GPU only the stream waits, so that the copy comes after the sum
            self._under_way.append((bucket, flat.to("cpu", non_blocking=True), work))
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def read(self) -> dict[str, Tensor]:
        """The totals, as CPU tensors of the shapes that were given."""
        if self._ready is not None:
            self._ready.synchronize()
        totals: list[Tensor] = []
        for bucket, flat, work in self._under_way:
            work.wait()
            totals += unpacked(flat, bucket)
        return self._alike | dict(zip(self._names, totals, strict=True))


def wide(value: Tensor | float) -> Tensor:
    """A number in the type in which numbers are added up: int64 if it is whole, else float64. Of the host's: there."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    kind = torch.float64 if value.dtype.is_floating_point else torch.int64
    return value if value.dtype == kind else value.to(kind)
