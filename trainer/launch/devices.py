"""What the devices of this machine can do, by torch's general interface: hardly any other file names a kind of device.

A kind is what torch calls it: cpu, cuda (ROCm's GPUs too), xpu (Intel's), mps (Apple's), or that of a plug-in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path, PurePosixPath

import torch


def accelerator_type() -> str | None:
    """The kind of accelerator that torch finds on this machine; None: there is the CPU alone."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device else None


def accelerator_names() -> list[str]:
    """The model name of each accelerator of this machine; its kind where torch knows no more (mps)."""
    kind = accelerator_type()
    if kind is None:
        return []
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [name_of(index) for index in range(torch.accelerator.device_count())]


def device_identity(device: torch.device) -> str:
    """A text that no other device of this machine has, though each process may see one alone, as number 0."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return f"{device} {getattr(properties(device), 'uuid', '') if properties else ''}"


def is_bf16_supported(kind: str, emulated: bool) -> bool | None:
    """Does the current device report bfloat16, perhaps `emulated`? None: it reports nothing (mps)."""
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    return supported(including_emulation=emulated) if supported else None


def compute_capability(kind: str) -> tuple[int, int]:
    """Which instructions the current device has, as NVIDIA counts them; kinds of others have no such number."""
    return torch.get_device_module(kind).get_device_capability()


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The type in which a device adds up: float64, or float32 where it has no other (Apple's GPUs, some of Intel's).

    In float32 nothing waits, either, but sums have 7 digits, and counts are exact up to 16.7 million.
    """
    try:
        # tried, not asked: some devices can keep what they cannot compute with
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
    """Bytes of the host's memory that its processes can still have; infinity where the system does not tell.

    In a container that is what its limit leaves; under a limit of addresses (`ulimit -v`) what this process can have.
    """
    return min(_available_addresses(), _available_to_all())


def _available_addresses() -> float:
    """Bytes that `ulimit -v` leaves to this process; infinity without a limit."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has none

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return inf if limit == resource.RLIM_INFINITY else float(limit - taken)
    return inf


def _available_to_all() -> float:
    """Bytes that the processes of this machine, or of this container, can still have together."""
    spare = inf
    with suppress(OSError, ValueError, StopIteration):  # Linux alone tells it so
        lines = Path("/proc/meminfo").read_text().splitlines()
        spare = min(spare, 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    return min([spare, *_left_by_cgroups()])


# Of `ulimit -v`: a thread takes 8 MiB of addresses for its stack and 64 for its heap, and uses hardly any of them.
_UNUSED_ADDRESSES = 2**30
_CGROUPS = Path("/sys/fs/cgroup")
# of cgroup v2 and v1: what bounds memory, what is used of it, and pages of files, which make room for whoever asks
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _left_by_cgroups() -> Iterator[float]:
    """Bytes that are left by each limit on this process: of its container, of a job of Slurm's or systemd's."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, (most, used, cached) = (_CGROUPS / "memory", _V1) if controllers else (_CGROUPS, _V2)
            # a limit holds for all groups below; in a container the topmost one is the container's own
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = root / str(group).lstrip("/")
                # no limit is written as `max`, or as a number larger than any memory
                with suppress(OSError, ValueError, KeyError):
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    files = sum(int(stat[name]) for name in cached)
                    yield int((folder / most).read_text()) - int((folder / used).read_text()) + files


def available_memory_per_rank(device: torch.device, local_ranks: int) -> float:
    """Bytes that each of so many processes of this machine can still have where it computes.

    A GPU is one process's own. The host's memory is shared, but a limit of addresses is each process's.
    """
    if device.type != "cpu":
        return available_memory(device)
    return min(_available_addresses() - _UNUSED_ADDRESSES, _available_to_all() / local_ranks)


def total_memory(device: torch.device) -> float:
    """Bytes of a device in all; where it does not tell, and on CPUs, those that are free."""
    memory = getattr(torch.get_device_module(device), "mem_get_info", None) if device.type != "cpu" else None
    return float(memory(device)[1]) if memory else available_memory(device)


def available_memory(device: torch.device) -> float:
    """Bytes that programs can still have on a device; on the CPU, and where a device reports none, on the host."""
    memory = getattr(torch.get_device_module(device), "mem_get_info", None) if device.type != "cpu" else None
    return float(memory(device)[0]) if memory else available_host_memory()


def memory_usage() -> dict[str, int]:
    """Bytes that this process has: `host` at present, `device` the most that its tensors took, if torch counts."""
    usage = {}
    with suppress(OSError):  # Linux alone tells it so
        usage["host"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    kind = accelerator_type()
    if kind and (most := getattr(torch.get_device_module(kind), "max_memory_allocated", None)):
        usage["device"] = most()
    return usage


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of random numbers that torch's functions use on this device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]  # cuda and xpu have them
