"""A rough time of a step: of each operator its products at the device's peak, or its bytes at its memory's speed.

No program reaches a data sheet, so that a real step takes longer.
"""

from __future__ import annotations

from typing import Any

from trainer.data.nested_tensors import tensors
from trainer.jobs.flops import operator_flops, peak_flops
from trainer.jobs.plan.devices import Device

_FREE = ("prim::", "profiler::", "aten::empty", "aten::new_empty", "aten::_unsafe_view")  # what no kernel computes


class Roofline:
    """The seconds that a rank computes, added up; None where the device's data sheet is not known."""

    def __init__(self, device: Device, arithmetic: str) -> None:
        """arithmetic: bf16, fp16, tf32, fp32 or fp64."""
        self._peak, self._bandwidth = peak_flops(device.name, arithmetic), device.bandwidth * 1e9
        self._seconds = 0.0

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add an operator up: products and traffic overlap inside of a kernel, so that the longer one counts."""
        if self._peak is None or func.is_view or func.name().startswith(_FREE):
            return
        # every input is read and every result written once, as if no cache kept anything between operators
        touched = {id(tensor): tensor.nbytes for tensor in [*tensors((list(args), kwargs)), *tensors(out)]}
        products = operator_flops(func, args, kwargs, out) / self._peak
        self._seconds += max(products, sum(touched.values()) / self._bandwidth)

    def take(self) -> float | None:
        """Seconds that have been counted since this was last called."""
        seconds, self._seconds = self._seconds, 0.0
        return None if self._peak is None else seconds
