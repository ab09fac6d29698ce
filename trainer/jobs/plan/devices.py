"""The devices that a plan knows, by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainer.messages import Refusal, did_you_mean

GIB = 2**30
OWN = "own"


@dataclass(frozen=True)
class Device:
    """One device, and how it is connected to others. Without a data sheet its speeds are 0, and nothing is timed."""

    name: str
    memory: float  # GiB
    bandwidth: float = 0.0  # of its memory, GB/s
    inside: float = 0.0  # GB/s to a device of the same machine, in one direction
    between: float = 0.0  # GB/s to one of another machine
    per_machine: int = 8  # devices of one machine
    reserved: float = 1.0  # GiB that the driver and the communication take before any tensor
    bf16: bool = True  # does it compute in bfloat16?

    @property
    def free(self) -> float:
        """Bytes that tensors can have."""
        return (self.memory - self.reserved) * GIB


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
    "cpu": Device("CPU", 16, reserved=0.5, bf16=False),  # one process on its share of an ordinary server
    OWN: Device(OWN, 0),
}


def find_device(name: str, memory: float | None, per_machine: int | None) -> Device:
    """The device of this name, with what keys say instead of the data sheet. Refusal of a name that is not known."""
    keys: dict[str, Any] = {"memory": memory, "per_machine": per_machine}
    keys = {key: value for key, value in keys.items() if value is not None}  # None: the key is not set
    for key, value in keys.items():
        if value <= 0:
            raise Refusal(f"job.{key}={value}: it must be more than 0")
    if name not in DEVICES:
        near = did_you_mean(name, DEVICES)
        raise Refusal(
            f"job.device={name}: no such device is known{near}; there are: {', '.join(DEVICES)}; own, with job.memory,"
            " is another one"
        )
    if name == OWN and memory is None:
        raise Refusal("job.device=own has no data sheet: give job.memory=… too")
    return replace(DEVICES[name], **keys)
