"""The devices that a plan knows, by their data sheets; keys replace what a data sheet says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

import torch

from trainer.jobs.flops import peak_flops
from trainer.messages import Refusal, did_you_mean

GIB = 2**30
# What programs reach of a data sheet: of products in large matrices, of the memory's bandwidth, of a link's.
REACHED = {"flops": 0.7, "bandwidth": 0.8, "link": 0.8}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


Points = Sequence[tuple[float, float]]  # work, seconds


def interpolate(points: Points, work: float) -> float:
    """Seconds of so much work, between measured points (work, seconds), which are in order."""
    (least, fastest), (most, slowest) = points[0], points[-1]
    if work <= least:
        return fastest  # the time that even nothing takes
    if work >= most:
        return slowest * work / most
    # a straight line between the logarithms
    at = next(index for index, (size, _) in enumerate(points) if size >= work)
    (low, first), (high, last) = points[at - 1], points[at]
    part = log(work / low) / log(high / low)
    return first * (last / first) ** part


@dataclass(frozen=True)
class Device:
    """One device, and how it is connected to others."""

    name: str
    memory: float  # GiB
    bandwidth: float  # of its memory, GB/s
    inside: float  # GB/s to a device of the same machine, in one direction
    between: float  # GB/s to one of another machine
    per_machine: int = 8  # devices of one machine
    reserved: float = 1.0  # GiB that the driver and the communication take before any tensor
    bf16: bool = True  # does it compute in bfloat16?
    peaks: tuple[tuple[str, float], ...] = ()  # 10¹² operations a second by precision, where flops.py has no entry
    launch_us: float = 5.0  # microseconds that each operator takes at least
    inside_us: float = 10.0  # until a collective inside a machine begins to move data
    between_us: float = 30.0  # the same between machines
    kernels: Mapping[str, Points] = field(default_factory=dict)  # measured times by kind of operator
    overhead_s: float = 0.0  # that Python and autograd take for an operator of forward and backward

    @property
    def free(self) -> float:
        """Bytes that tensors can have."""
        return (self.memory - self.reserved) * GIB

    def seconds(self, kind: str, flops: float, moved: float, dtype: torch.dtype, overhead: float = 0.0) -> float:
        """How long an operator takes: as measured for its kind; else as long as its products or its bytes take."""
        if points := self.kernels.get(kind):
            return interpolate(points, flops or moved) + overhead
        rate = dict(self.peaks).get(_DTYPES.get(dtype, "fp32"))
        # of a precision that nobody knows: 10¹², so low that the row looks slow and nobody chooses it by mistake
        peak = rate * 1e12 if rate else peak_flops(self.name, _DTYPES.get(dtype, "fp32")) or 1e12
        products = flops / (peak * REACHED["flops"])
        # the roofline: products and memory traffic overlap inside a kernel, so that the longer one counts
        return max(products, moved / (self.bandwidth * 1e9 * REACHED["bandwidth"])) + self.launch_us * 1e-6

    def send_seconds(self, wire: float, calls: int, between: bool) -> float:
        """How long so many bytes take that this device sends in so many collectives."""
        speed, delay = (self.between, self.between_us) if between else (self.inside, self.inside_us)
        # bytes at the link's speed, and for each collective a delay that does not depend on its size: α + β·n
        return wire / (speed * 1e9 * REACHED["link"]) + calls * delay * 1e-6


# Memory and its bandwidth from the makers' data sheets; links: NVLink or Infinity Fabric in one direction, else PCIe;
# between machines what such machines usually have: 400 Gbit/s a GPU, 100 Gbit/s for the smaller ones.
DEVICES = {
    "a100-40": Device("A100", 40, 1555, 300, 25),
    "a100-80": Device("A100", 80, 2039, 300, 25),
    "h100": Device("H100", 80, 3350, 450, 50),
    "h200": Device("H200", 141, 4800, 450, 50),
    "b200": Device("B200", 180, 8000, 900, 50),
    "l4": Device("L4", 24, 300, 16, 12.5),
    "rtx4090": Device("RTX 4090", 24, 1008, 16, 12.5, peaks=(("bf16", 165.2), ("fp16", 165.2), ("fp32", 82.6))),
    "v100": Device("V100", 32, 900, 150, 12.5, bf16=False, peaks=(("fp16", 125), ("fp32", 15.7), ("fp64", 7.8))),
    "t4": Device("T4", 16, 320, 12, 12.5, bf16=False, peaks=(("fp16", 65), ("fp32", 8.1), ("fp64", 0.25))),
    "mi300x": Device("MI300X", 192, 5300, 448, 50),
    # one process on its share of an ordinary server; keys give what a server really has
    "cpu": Device(
        "CPU",
        memory=16,
        bandwidth=20,
        inside=2,
        between=1,
        reserved=0.5,
        bf16=False,
        peaks=(("fp32", 0.1), ("fp64", 0.05), ("bf16", 0.05), ("fp16", 0.05)),
        launch_us=10,
        inside_us=200,
        between_us=500,
    ),
}


def find_device(name: str, given: Mapping[str, float | None]) -> Device:
    """The device of this name, with what keys say instead of the data sheet. Refusal of a name that is not known."""
    if name not in DEVICES:
        near = did_you_mean(name, DEVICES)
        raise Refusal(f"job.device={name}: no such device is known{near}; there are: {', '.join(DEVICES)}")
    for key, value in given.items():  # None: the key is not set
        if value is not None and value <= 0:
            raise Refusal(f"job.{key}={value}: it must be more than 0")
    return replace(DEVICES[name], **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
