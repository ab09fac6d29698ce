"""What each rank's machine is: device, versions, limits. Do they agree, and are they enough?"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from math import inf
from pathlib import Path
from typing import Any

import torch

from trainer import __version__
from trainer.jobs.doctor.findings import ExaminedRanks, Finding, Level, find_unusual
from trainer.launch.devices import accelerator_names, available_host_memory, available_memory, total_memory
from trainer.launch.store_collectives import machine_id
from trainer.messages import format_count

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED, _ENOUGH_SHARED = 2**26, 2**30  # bytes: what a container gets if nobody says more; what loaders fill
_DESCRIPTORS, _PER_RANK = 256, 8  # of a process; for each rank that it may be connected with
_FREE = 0.9  # of a device's memory; less is another program's
_RDMA = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard", "rich")


def machine_and_network() -> str:
    """What processes have in common that share a machine and, if they are in containers, its network."""
    with suppress(OSError):
        return f"{machine_id()} {os.readlink('/proc/self/ns/net')}"
    return machine_id()


@dataclass(frozen=True)
class HostFacts:
    """What one rank says of itself. Numbers that a machine does not tell are infinite."""

    device: str
    memory: float  # bytes of the device; of a CPU those that are free
    free: float  # of them, before this program has taken any
    processors: int  # that this process may use
    threads: int  # of one operation
    descriptors: float  # open files at most
    shared_memory: float  # bytes that are left in /dev/shm, or that the container leaves for them
    locked_memory: float  # bytes that may be pinned for the network
    rdma: tuple[str, ...]  # adapters that write into another machine's memory (InfiniBand, RoCE)
    network_rate: float  # bytes a second of the interface that is used, or else of the fastest one, as it says itself
    versions: dict[str, Any]


def software_versions() -> dict[str, Any]:
    """The versions of all that computes: Python, the system, packages, and what torch was built for."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            "trainer": __version__,
            **{name: next((each.version for each in distributions(name=name)), None) for name in _PACKAGES},
        },
        **{name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")},
    }


def collect_host_facts(device: torch.device, interface: str | None) -> HostFacts:
    """The facts of this rank. interface: what the network uses; None: not known."""
    free = available_memory(device)
    return HostFacts(
        device=platform.machine() if device.type == "cpu" else accelerator_names()[device.index or 0],
        memory=total_memory(device),
        free=free,
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        shared_memory=_shared_memory(),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(os.listdir(_RDMA))) if _RDMA.is_dir() else (),
        network_rate=_network_rate(device, interface),
        versions=software_versions(),
    )


def _shared_memory() -> float:
    """Bytes that are left for memory which processes share; they count as this container's memory, too."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else inf
    return min(available_host_memory(), free)


def _limit(which: int) -> float:
    """A limit of this process; infinity where there is none."""
    soft, _ = resource.getrlimit(which)
    return inf if soft == resource.RLIM_INFINITY else float(soft)


def _network_rate(device: torch.device, interface: str | None) -> float:
    """Bytes a second, by what the adapters say that they do; infinity where none says it."""
    # bridges and tunnels of containers say 10 Gbit/s, whatever is below them: only what has a device counts
    real = [path.parent.name for path in _INTERFACES.glob("*/device")]
    speeds = [0.0]
    for each in [interface] if interface else real:
        with suppress(OSError, ValueError):  # one that is down, or virtual, says nothing, or -1
            speeds.append(float((_INTERFACES / each / "speed").read_text()) * 1e6 / 8)  # Mbit/s
    if device.type != "cpu":  # what sends a GPU's tensors also knows these
        for path in _RDMA.glob("*/ports/*/rate"):
            with suppress(OSError, ValueError):
                speeds.append(float(path.read_text().split()[0]) * 1e9 / 8)  # `200 Gb/sec (4X HDR)`
    return max(speeds) if max(speeds) > 0 else inf


def judge_facts(site: ExaminedRanks, facts: list[HostFacts]) -> list[Finding]:
    """What differs between ranks and must not, and limits that are too low."""
    findings = find_unusual(site, [each.device for each in facts], "computes on {}, the others on {}".format, "warning")
    versions = [{**each.versions, **each.versions["packages"]} for each in facts]
    for key in [key for key in versions[0] if key != "packages"]:
        # a machine's system may differ; what computes and sends must not
        level: Level = "warning" if key == "platform" else "error"
        values = [str(each.get(key)) for each in versions]
        findings += find_unusual(site, values, f"has {key} {{}}, the others {{}}".format, level)
    for rank in site.first_ranks():
        findings += _judge_limits(site, rank, facts[rank])
    for rank, each in enumerate(facts):
        if site.device.type != "cpu" and each.free < _FREE * each.memory:
            taken = (each.memory - each.free) / 2**30
            findings.append(
                site.finding("warning", f"has a device of which others have taken {taken:.1f} GiB already", rank)
            )
    if is_crowded(site, facts):
        findings.append(Finding("note", "there are more ranks than processors: times include waiting for a processor"))
    return findings


def is_crowded(site: ExaminedRanks, facts: list[HostFacts]) -> bool:
    """Do the ranks of some machine have fewer processors than they are?"""
    return any(facts[rank].processors < site.machines.count(site.machines[rank]) for rank in site.first_ranks())


def _judge_limits(site: ExaminedRanks, rank: int, facts: HostFacts) -> list[Finding]:
    """Limits of one machine that a run would meet."""
    findings = []
    needed = _DESCRIPTORS + _PER_RANK * site.world.size
    if facts.descriptors < needed:
        sentence = (
            f"may open {facts.descriptors:.0f} files, and a run of {format_count(site.world.size, 'rank')} needs"
            f" {_DESCRIPTORS} + {_PER_RANK} × {site.world.size} = {needed}; ulimit -n {needed} raises it"
        )
        findings.append(site.finding("error", sentence, rank))
    if facts.shared_memory < _ENOUGH_SHARED:
        level: Level = "error" if facts.shared_memory <= _LEAST_SHARED else "warning"
        sentence = (
            f"has {facts.shared_memory / 2**20:.0f} MiB of shared memory, where loader.workers and NCCL put what they"
            " pass on; docker run --shm-size=8g (or --ipc=host), on Kubernetes an emptyDir with medium: Memory"
        )
        findings.append(site.finding(level, sentence, rank))
    if facts.rdma and facts.locked_memory < inf:
        sentence = (
            f"has {', '.join(facts.rdma)} and may lock {facts.locked_memory / 2**20:.0f} MiB of memory for it; NCCL"
            " then fails or uses sockets; ulimit -l unlimited, docker run --ulimit memlock=-1"
        )
        findings.append(site.finding("warning" if site.device.type == "cpu" else "error", sentence, rank))
    return findings
