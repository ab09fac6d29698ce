"""status.json: the truth about how a run stands or ended, replaced in one step."""

import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.launch.durable import replace_file

NAME = "status.json"
# Of a run that fails before it could say more.
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
State = Literal["running", "completed", "preempted", "failed"]


@dataclass
class Status:
    """Writes the status of one attempt; counts the attempts, and the steps of all of them.

    Goodput is distinct useful steps / steps executed. The steps of an attempt that was killed are those it had
    reported last.
    """

    folder: Path
    before: dict[str, Any] = field(default_factory=dict)  # what the attempt before left

    def __post_init__(self) -> None:
        self.before = read_status(self.folder) or {}

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1 over the life of the folder."""
        return _count(self.before.get("attempt")) + 1

    def write(
        self,
        state: State,
        *,
        step: int,
        resume_step: int,
        world_size: int,
        strategy: str,
        reason: str | None = None,
        root_rank: int | None = None,
    ) -> None:
        """Replace status.json. While the run goes on it need not survive a power cut, its end must."""
        first = _count(self.before.get("first_step")) if self.before else resume_step
        executed = _count(self.before.get("executed")) + step - resume_step
        said = {
            "state": state,
            "reason": reason,
            "root_rank": root_rank,
            "step": step,
            "resume_step": resume_step,
            "world_size": world_size,
            "strategy": strategy,
            "attempt": self.attempt,
            "goodput": round((step - first) / executed, 4) if executed > 0 else 1.0,
            "executed": executed,
            "first_step": first,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        replace_file(self.folder / NAME, json.dumps(said, indent=1) + "\n", sync=state != "running")


def read_status(folder: Path) -> dict[str, Any] | None:
    """What status.json says; None where there is none that can be read."""
    try:
        said = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {**_NOTHING_YET, **said} if isinstance(said, dict) else None


def mark_failed(folder: Path, reason: str, root_rank: int | None) -> None:
    """Say in status.json that the run failed. Any rank may: the main one may be stuck or dead."""
    said = read_status(folder) or {**_NOTHING_YET}
    if (said["state"], said["reason"]) != ("failed", reason):
        said |= {"state": "failed", "reason": reason, "root_rank": root_rank, "time": time.time()}
        replace_file(folder / NAME, json.dumps(said, indent=1) + "\n")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
