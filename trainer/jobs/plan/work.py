"""What a rank computes in a step, and how long a device needs for it at least: the roofline."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trainer.data.nested_tensors import tensors
from trainer.jobs.plan.devices import Device


class Work:
    """The operations, the bytes that pass through a device's memory, and the seconds of a step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flops = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by phase

    def take(self) -> tuple[float, dict[str, float]]:
        """Operations, and seconds by phase, that have been counted since this was last called."""
        flops, seconds = self._flops, dict(self._seconds)
        self._flops = 0.0
        self._seconds.clear()
        return flops, seconds

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, phase: str) -> None:
        """Add an operator up."""
        if func.is_view:
            return
        # every input is read and every result written once, as if no cache kept anything between operators
        touched = [*tensors((list(args), kwargs)), *tensors(out)]
        # matrix products, convolutions and attention have a formula; all else counts by its bytes alone
        formula = flop_registry.get(func.overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        dtype = touched[0].dtype if touched else torch.float32
        self._flops += flops
        self._seconds[phase] += self._device.seconds(flops, sum(tensor.nbytes for tensor in touched), dtype)
