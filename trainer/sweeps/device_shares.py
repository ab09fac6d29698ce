"""What each of several runs at once may use of this machine: its part of the GPUs, and of the cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA's and ROCm's; no other kind of device is shared out


@dataclass(frozen=True)
class DeviceShare:
    """One of several equal parts of this machine."""

    environment: dict[str, str]  # what a process must be told to use no more
    label: str = ""  # its GPUs, in words; empty: there are none, or all are its own


def visible_gpus(device: str) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none where runs compute elsewhere."""
    if device not in ("auto", "cuda"):
        return []
    import torch  # only now: it takes seconds

    from trainer.launch.devices import accelerator_type

    if accelerator_type() != "cuda":
        return []
    known = os.environ.get(_VISIBLE)
    return known.split(",") if known else [str(index) for index in range(torch.accelerator.device_count())]


def divide_machine(
    at_once: int | Literal["auto"], processes: int | str | None, gpus: Sequence[str]
) -> list[DeviceShare]:
    """The machine in so many parts; one has all of it. auto: as many as there are GPUs for, of a run's processes each.

    More runs than GPUs: several share one.
    """
    each = processes if isinstance(processes, int) else 1
    most = 1 if processes == "auto" else max(1, len(gpus) // each)
    count = most if at_once == "auto" else at_once
    if count == 1:
        return [DeviceShare({})]
    # as many for each, none for one more: a batch that divides among the GPUs of one divides among those of all
    own = max(1, len(gpus) // count)
    parts = [gpus[at * own : (at + 1) * own] or gpus[at % max(1, len(gpus)) :][:1] for at in range(count)]
    # more threads than cores wait for each other
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // (count * each)))
    return [
        DeviceShare(
            {"OMP_NUM_THREADS": threads} | ({_VISIBLE: ",".join(part)} if part else {}),
            f"GPU {','.join(part)}" if part else "",
        )
        for part in parts
    ]
