"""status.json: the truth about how a run stands or ended, replaced in one step."""

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from trainer.launch.durable import replace_file

NAME = "status.json"
PAUSE = 1.0  # seconds between two reports of a running attempt: each takes a disk longer than a small network's step
# Of a run that fails before it could say more: scripts find every key all the same.
_NOTHING_YET = {
    "state": None,
    "reason": None,
    "root_rank": None,
    "step": 0,
    "resume_step": 0,
    "world_size": None,
    "strategy": None,
    "attempt": 1,
    "goodput": 1.0,
}


class Status:
    """Writes the status of one attempt; counts the attempts, and the steps of all of them.

    Goodput is distinct useful steps / steps executed. The steps of an attempt that was killed are those it had
    reported last.
    """

    def __init__(self, folder: Path, resume_step: int, world_size: int, strategy: str) -> None:
        before = read_status(folder) or {}
        self._path, self._executed = folder / NAME, before.get("executed", 0)
        self._reported = -math.inf  # when, by the clock
        self._facts = {
            "resume_step": resume_step,
            "world_size": world_size,
            "strategy": strategy,
            "attempt": before.get("attempt", 0) + 1,
            "first_step": before.get("first_step", resume_step),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def write(self, state: str, step: int, reason: str | None) -> None:
        """Replace status.json; while the run goes on, once a second. The end must survive a power cut."""
        if state == "running" and time.monotonic() < self._reported + PAUSE:
            return
        self._reported = time.monotonic()
        executed, useful = self._executed + step - self._facts["resume_step"], step - self._facts["first_step"]
        said = {
            "state": state,
            "reason": reason,
            "root_rank": None,
            "step": step,
            "goodput": round(useful / executed, 4) if executed > 0 else 1.0,
            "executed": executed,
            "time": time.time(),
            **self._facts,
        }
        replace_file(self._path, json.dumps(said, indent=1) + "\n", lasting=state != "running")


def read_status(folder: Path) -> dict[str, Any] | None:
    """What status.json says; None where there is none that can be read."""
    try:
        return {**_NOTHING_YET, **json.loads((folder / NAME).read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return None


def mark_failed(folder: Path, reason: str, root_rank: int | None) -> None:
    """Say in status.json that the run failed. Any rank may: the main one may be stuck or dead."""
    said = read_status(folder) or {**_NOTHING_YET}
    if (said["state"], said["reason"]) != ("failed", reason):
        said |= {"state": "failed", "reason": reason, "root_rank": root_rank, "time": time.time()}
        replace_file(folder / NAME, json.dumps(said, indent=1) + "\n")
