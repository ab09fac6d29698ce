"""What torch remembers of this process's last collectives, kept in a file where a run hangs.

torch records the latest of each backend in memory, by default 2,000: the operation, its sizes, its group, its number
in the group, and whether it was begun and done. Beside those of the other ranks that says which one is missing where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer.launch.safe_files import replace_file

# private names; in torch 2.11 to 2.15, the first one in builds with NCCL only
RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}


def recorded_collectives() -> dict[str, Any]:
    """The records of each backend that has any. Asks no device and waits for nobody."""
    # a process that has not imported it has done no collective
    torch_c10d = sys.modules.get("torch._C._distributed_c10d")
    records = {}
    for backend, name in RECORDERS.items():
        if (dump := getattr(torch_c10d, name, None)) is not None:
            records[backend] = json.loads(dump())
    return {backend: record for backend, record in records.items() if record.get("entries")}


def save_collectives(folder: Path, rank: int) -> Path | None:
    """Write the records into a run's logs; None where there are none. OSError where the disk is full."""
    records = recorded_collectives()
    if not records:
        return None
    path = folder / "logs" / f"collectives-{rank}.json"
    replace_file(path, json.dumps(records) + "\n", lasting=False)
    return path
