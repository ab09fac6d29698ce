"""What the device of a run can do, asked of torch's general interface: hardly anybody else knows devices by name.

A kind is what torch calls it: cpu, cuda (ROCm's GPUs too), xpu (Intel's), mps (Apple's), or that of a plug-in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

import torch


def accelerator_type() -> str | None:
    """The kind of accelerator that torch finds on this machine; None: there is the CPU alone."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else None


def device_types() -> Iterator[str]:
    """Every kind of device that this machine computes on."""
    yield "cpu"
    if found := accelerator_type():
        yield found


def accelerator_names() -> list[str]:
    """What their makers call the accelerators of this machine; their kind where torch knows no more (mps)."""
    kind = accelerator_type()
    if kind is None:
        return []
    known = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [known(index) for index in range(torch.accelerator.device_count())]


def device_identity(device: torch.device) -> str:
    """What tells a device of this machine from the others, though each process may see one alone, and call it 0."""
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    return f"{device} {getattr(asked(device), 'uuid', '') if asked else ''}"


def is_bf16_supported(kind: str, emulated: bool) -> bool | None:
    """Does the current device say that it has bfloat16, perhaps `emulated`? None: it does not say (mps)."""
    asked = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    return asked(including_emulation=emulated) if asked else None


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The type in which a device adds up: float64, or float32 where it has no other (Apple's GPUs, some of Intel's).

    In float32 nothing waits, either, but sums have 7 digits, and counts are exact up to 16.7 million.
    """
    try:
        # asked by adding up: some devices can keep what they cannot compute with
        torch.ones(2, dtype=torch.float64, device=device).sum()
    except torch.OutOfMemoryError:  # says nothing about types
        raise
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def uses_pinned_memory(device: torch.device) -> bool:
    """Do copies between the host and this device pass through pinned memory, so that the host need not wait for them?

    Not on Apple's: it shares the host's memory, torch pins none of it, and a copy that nobody waits for may be read too
    early there.
    """
    return device.type not in ("cpu", "mps")


def available_host_memory() -> float:
    """Bytes of the host's memory that programs can still have, of all its processes; infinity where it does not tell.

    In a container that is what its limit leaves; under a limit of addresses (`ulimit -v`) what this process can have.
    """
    spare = inf
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has none

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        spare = inf if limit == resource.RLIM_INFINITY else float(limit - taken)
    with suppress(OSError, ValueError, StopIteration):  # Linux alone tells it so
        lines = Path("/proc/meminfo").read_text().splitlines()
        spare = min(spare, 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # no limit stands there as `max`
        limit, used = (int(Path("/sys/fs/cgroup", f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = [
            line.split()[1]
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        ]
        spare = min(spare, limit - used + sum(map(int, cached)))
    return spare


def available_memory(device: torch.device) -> float:
    """Bytes that programs can still have on a device; on the CPU, and where a device does not tell, of the host's."""
    asked = getattr(torch.get_device_module(device), "mem_get_info", None) if device.type != "cpu" else None
    return float(asked(device)[0]) if asked else available_host_memory()


def memory_usage() -> dict[str, int]:
    """Bytes that this process has: `host` at present, `device` the most that its tensors took, if torch counts."""
    found = {}
    with suppress(OSError):  # Linux alone tells it so
        found["host"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    kind = accelerator_type()
    if kind and (most := getattr(torch.get_device_module(kind), "max_memory_allocated", None)):
        found["device"] = most()
    return found


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a network draws from there."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]  # cuda and xpu have them
