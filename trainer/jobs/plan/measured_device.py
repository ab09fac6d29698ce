"""A device as `job=doctor` has measured it, in the place of what its data sheet says."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from trainer.jobs.doctor.cost_model import LinearCost
from trainer.jobs.plan.devices import CPU, GIB, Device, Points
from trainer.messages import Refusal

_FILE = "doctor.json"  # of jobs/doctor


@dataclass(frozen=True)
class DoctorFile:
    """What a doctor.json says."""

    path: Path
    content: Mapping[str, Any]

    @property
    def processors(self) -> int:
        """Of a machine, for all of its ranks."""
        return int(self.content["ranks"][0]["processors"])


def read_doctor_file(asked: str | bool | None, root: Path, device: Device) -> DoctorFile | None:
    """The file of this name, whatever machine made it; None asks for that of this machine, where there is one."""
    if asked is False:
        return None
    path = root / _FILE if asked is None or asked is True else Path(asked).expanduser()
    try:
        doctor = DoctorFile(path, json.loads(path.read_text()))
        ranks, is_well = doctor.content["ranks"], bool(doctor.content["ok"] and doctor.content["kernels"])
        is_kind = all(_is_kind(rank["device"], device) for rank in ranks)
        is_here = any(rank["host"] == socket.gethostname() for rank in ranks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if asked is None:
            return None  # there is none, or one of an earlier version
        raise Refusal(f"job.doctor={path}: no doctor.json of this version: {error}") from None
    if asked is None:
        return doctor if is_well and is_kind and is_here else None
    if not is_kind:
        raise Refusal(f"job.doctor={path} is about {ranks[0]['device']}, and job.device about {device.name}")
    return doctor


def _is_kind(name: str, device: Device) -> bool:
    # a doctor names a CPU by its architecture
    return name == platform.machine() if device.name == CPU else device.name in name


def measured_device(device: Device, doctor: DoctorFile, processes: int) -> Device:
    """The device with the measured times, where so many processes run; what was not measured stays."""
    ranks, local = doctor.content["ranks"], min(processes, device.per_machine)
    memory = min(rank["free"] if rank["free"] is not None else inf for rank in ranks)
    memory = memory / local if device.name == CPU else memory  # the processes of a machine share it
    kernels = doctor.content["kernels"]
    # processes that share few processors wait for each other
    threads = max(1, doctor.processors // local)
    crowd = max(1.0, local / doctor.processors) * kernels["threads"] / threads if device.name == CPU else 1.0
    links, slower = doctor.content["links"], kernels["collectives"]
    middle = sorted(links, key=lambda link: link["bytes_per_s"] or inf)[len(links) // 2] if links else None
    return replace(
        device,
        memory=memory / GIB if memory < inf else device.memory,
        kernels={kind: _slower(each, crowd * kernels["compute"]) for kind, each in kernels["seconds"].items()},
        overhead_s=kernels["overhead_s"] * max(1.0, local / doctor.processors),
        collectives={
            key: _slower(each, slower) for key, each in _collective_points(doctor.content["collectives"]).items()
        },
        link=LinearCost(middle["latency_s"] * slower, (middle["bytes_per_s"] or inf) / slower) if middle else None,
    )


def _slower(points: Points, factor: float) -> Points:
    """The same times, so many times as long."""
    return [(work, seconds * factor) for work, seconds in points]


def _collective_points(rows: list[Mapping[str, Any]]) -> dict[tuple[str, int, bool], Points]:
    """Of each collective, over so many ranks, between machines or not: its (bytes, seconds)."""
    points: dict[tuple[str, int, bool], list[tuple[float, float]]] = {}
    for row in rows:
        is_far = row["group"] == "across machines"
        points.setdefault((row["op"].replace("_", "-"), row["ranks"], is_far), []).append(
            (row["bytes"], row["seconds"])
        )
    return {key: sorted(each) for key, each in points.items()}


def describe_doctor(doctor: DoctorFile) -> str:
    """What was used of it, in one line for people."""
    when = datetime.fromtimestamp(doctor.content["time"], UTC).date()
    kernels = doctor.content["kernels"]
    work, seconds = kernels["seconds"]["mm"][-1]
    memory = min(rank["memory_bytes_per_s"] for rank in doctor.content["ranks"])
    rates = f"{work / seconds / 1e9:,.0f} GFLOP/s in {kernels['dtype']}, memory {memory / 1e9:.3g} GB/s"
    groups = sorted({(row["group"]) for row in doctor.content["collectives"]})
    collectives = f", collectives over {'; '.join(groups)}" if groups else ""
    return f"by job=doctor of {when}: {rates}, {len(kernels['seconds'])} kinds of operators{collectives}"
