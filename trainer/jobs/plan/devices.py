"""The devices that a plan knows, by their data sheets; keys replace what a data sheet says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.jobs.doctor.cost_model import LinearCost, model_cost
from trainer.jobs.flops import peak_flops
from trainer.messages import Refusal, did_you_mean

GIB = 2**30
CPU, OWN = "CPU", "own"
# What programs reach of a data sheet: of products in large matrices, of the memory's bandwidth, of a link's.
REACHED = {"flops": 0.7, "bandwidth": 0.8, "link": 0.8}
# Times as long as its bytes take, which BatchNorm reads more than once; in bfloat16, on an H100.
_REREAD = {"batch norm": 3.4, "batch norm backward": 2.0}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_NEEDED = ("memory", "flops", "bandwidth", "inside", "between")  # keys of a device that has no data sheet here
Points = Sequence[tuple[float, float]]  # work, seconds


def interpolate(points: Points, work: float) -> float:
    """Seconds of so much work, on straight lines between measured points (work, seconds), which are in order."""
    (least, fastest), (most, slowest) = points[0], points[-1]
    if work <= least:
        return fastest  # the time that even nothing takes
    if work >= most:
        return slowest * work / most
    # what takes a + b·work, and in small pieces one time for all, is on or a little below such a line
    at = next(index for index, (size, _) in enumerate(points) if size >= work)
    (low, first), (high, last) = points[at - 1], points[at]
    return first + (last - first) * (work - low) / (high - low)


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
    peaks: Mapping[str, float] = field(
        default_factory=dict
    )  # 10¹² operations a second by precision, if flops.py has none
    launch_us: float = 5.0  # microseconds that each operator takes at least
    inside_us: float = 10.0  # until a collective inside a machine begins to move data
    between_us: float = 30.0  # the same between machines
    # what a doctor has measured, and goes before the numbers above
    kernels: Mapping[str, Points] = field(default_factory=dict)  # by kind of operator
    overhead_s: float = 0.0  # that Python and autograd take for an operator of forward and backward
    collectives: Mapping[tuple[str, int, bool], Points] = field(
        default_factory=dict
    )  # by kind, ranks, between machines
    link: LinearCost | None = None  # one way between two ranks of a machine

    @property
    def free(self) -> float:
        """Bytes that tensors can have."""
        return (self.memory - self.reserved) * GIB

    @property
    def is_host(self) -> bool:
        """Do the same processors compute, send, and run Python?"""
        return self.name == CPU

    def seconds(self, kind: str, flops: float, moved: float, dtype: torch.dtype) -> float:
        """How long an operator takes: as measured for its kind; else as long as its products or its bytes take."""
        if points := self.kernels.get(kind):
            took = interpolate(points, flops or moved)
            # on a GPU a product of few channels takes as long as its bytes
            return took if self.is_host else max(took, interpolate(self.kernels["elementwise"], moved))
        precision = _DTYPES.get(dtype, "fp32")
        peak = self.peaks.get(precision, 0) * 1e12 or peak_flops(self.name, precision) or 1e12
        products = flops / (peak * REACHED["flops"])
        moved *= _REREAD.get(kind, 1.0)
        # the roofline: products and memory traffic overlap inside a kernel, so that the longer one counts
        return max(products, moved / (self.bandwidth * 1e9 * REACHED["bandwidth"])) + self.launch_us * 1e-6

    def together(self, kernels: float, operators: int) -> float:
        """Seconds of so many operators, whose kernels take so long: a GPU computes while the host goes on."""
        prepared = operators * self.overhead_s
        return kernels + prepared if self.is_host else max(kernels, prepared)

    def send_seconds(self, op: str, ranks: int, is_far: bool, calls: float, size: float, wire: float) -> float:
        """How long so many collectives take together that have this many bytes, of which this rank sends `wire`."""
        points = self.collectives.get((op, ranks, is_far))
        if points and calls:
            return calls * interpolate(points, size / calls)
        if self.link is not None and not is_far and calls:  # a group of a size that was not measured
            if op in ("send", "receive"):
                return calls * self.link.seconds(size / calls)
            return calls * model_cost(op.replace("-", "_"), ranks, self.link).seconds(size / calls)
        speed, delay = (self.between, self.between_us) if is_far else (self.inside, self.inside_us)
        # bytes at the link's speed, and for each collective a delay that does not depend on its size: α + β·n
        return wire / (speed * 1e9 * REACHED["link"]) + calls * delay * 1e-6


# Memory and its bandwidth from the makers' data sheets; products are in flops.py. Links in one direction: NVLink or
# Infinity Fabric, else PCIe (16 lanes); an RTX 4090 reaches its neighbour only through the host's memory: half.
# Between machines what such machines usually have: 400 Gbit/s a GPU, 100 Gbit/s for the smaller ones.
DEVICES = {
    "a100-40": Device("A100", 40, 1555, 300, 25),
    "a100-80": Device("A100", 80, 2039, 300, 25),
    "h100": Device("H100", 80, 3350, 450, 50),
    "h200": Device("H200", 141, 4800, 450, 50),
    "b200": Device("B200", 180, 8000, 900, 50),
    "l4": Device("L4", 24, 300, 32, 12.5),
    "rtx4090": Device("RTX 4090", 24, 1008, 16, 12.5),
    "v100": Device("V100", 32, 900, 150, 12.5, bf16=False),
    "t4": Device("T4", 16, 320, 16, 12.5, bf16=False),
    "mi300x": Device("MI300X", 192, 5300, 448, 50),
    # one process on its share of an ordinary server; keys or a doctor's file give what a server really has
    "cpu": Device(
        CPU,
        memory=16,
        bandwidth=20,
        inside=2,
        between=1,
        reserved=0.5,
        bf16=False,
        peaks={"fp32": 0.1, "fp64": 0.05, "bf16": 0.05, "fp16": 0.05},
        launch_us=10,
        inside_us=200,
        between_us=500,
    ),
}


def find_device(name: str, given: Mapping[str, float | None]) -> Device:
    """The device of this name, with what keys say instead of the data sheet. Refusal of a name that is not known."""
    keys = {key: value for key, value in given.items() if value is not None}  # None: the key is not set
    for key, value in keys.items():
        if value <= 0:
            raise Refusal(f"job.{key}={value}: it must be more than 0")
    if name == OWN:
        if missing := [f"job.{key}=…" for key in _NEEDED if key not in keys]:
            raise Refusal(f"job.device=own has no data sheet: give {' '.join(missing)} too")
        return with_keys(Device(OWN, 0, 0, 0, 0), keys)
    if name not in DEVICES:
        near = did_you_mean(name, DEVICES)
        raise Refusal(
            f"job.device={name}: no such device is known{near}; there are: {', '.join(DEVICES)}; job.device=own with"
            f" {', '.join(f'job.{key}' for key in _NEEDED)} describes another one"
        )
    return with_keys(DEVICES[name], keys)


def with_keys(device: Device, keys: Mapping[str, float | None]) -> Device:
    """The device with what these keys say, also where a doctor has measured it."""
    set_keys: dict[str, Any] = {key: value for key, value in keys.items() if value is not None}
    flops = set_keys.pop("flops", None)
    if flops is not None:  # of the precision of the run, whichever it is
        set_keys["peaks"] = dict.fromkeys(_DTYPES.values(), flops)
    if flops is not None or "bandwidth" in set_keys:
        set_keys["kernels"] = {}
    if {"inside", "between"} & {*set_keys}:
        set_keys |= {"collectives": {}, "link": None}
    return replace(device, **set_keys)
