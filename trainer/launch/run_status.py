"""status.json: the state of a run, and how it ended."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from trainer.launch.safe_files import overwrite_in_place, replace_file
from trainer.launch.typed_values import DamagedFile, Finite, Text, Whole, form, read_json

STATUS_FILE = "status.json"
REPORT_INTERVAL = (
    1.0  # seconds between two reports of a running attempt: each takes a disk longer than a small network's step
)
log = logging.getLogger(__name__)
# Of a run that fails before it could write more: scripts find every key all the same.
_DEFAULTS = {
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


class StatusFields(TypedDict):
    """status.json, as far as it is read."""

    state: Annotated[str, form("running|completed|preempted|failed")]
    step: Whole
    resume_step: NotRequired[Whole]
    first_step: NotRequired[Whole]
    attempt: NotRequired[Whole]
    pid: NotRequired[Whole]
    goodput: NotRequired[Finite]
    executed: NotRequired[Finite]
    time: NotRequired[Finite]
    reason: NotRequired[Text | None]
    strategy: NotRequired[Text | None]
    host: NotRequired[Text | None]
    root_rank: NotRequired[Whole | None]
    world_size: NotRequired[Whole | None]


class StatusWriter:
    """Writes the status of one attempt; counts the attempts, and the steps of all of them.

    Goodput is distinct useful steps / steps executed. The steps of an attempt that was killed are those it had
    reported last, or those it had saved.
    """

    def __init__(
        self, folder: Path, resume_step: int, world_size: int, strategy: str, interval: float = REPORT_INTERVAL
    ) -> None:
        before = read_status(folder) or {}
        if not before and (folder / STATUS_FILE).exists():
            log.warning("damaged: %s; starts are counted from 1 again", folder / STATUS_FILE)
        self._path = folder / STATUS_FILE
        # a checkpoint may be newer than the last report, which comes once a second at most: its steps were done, too
        self._executed = before.get("executed", 0) + max(0, resume_step - before.get("step", resume_step))
        self._reported, self._interval = -math.inf, interval  # when, by the clock
        self._facts = {
            "resume_step": resume_step,
            "world_size": world_size,
            "strategy": strategy,
            "attempt": before.get("attempt", 0) + 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "first_step": before.get("first_step", resume_step),
        }

    def write(self, state: str, step: int, reason: str | None) -> None:
        """Replace status.json; while the run goes on, once a second. The end must survive a power cut."""
        if state == "running" and time.monotonic() < self._reported + self._interval:
            return
        self._reported = time.monotonic()
        executed, useful = self._executed + step - self._facts["resume_step"], step - self._facts["first_step"]
        status = {
            "state": state,
            "reason": reason,
            "root_rank": None,
            "step": step,
            "goodput": round(useful / executed, 4) if executed > 0 else 1.0,
            "executed": executed,
            "time": time.time(),
            **self._facts,
        }
        _replace_status(self._path, status, lasting=state != "running")


def read_status(folder: Path) -> dict[str, Any] | None:
    """What status.json says; None where there is none that can be read."""
    try:
        return {**_DEFAULTS, **read_json(folder / STATUS_FILE, StatusFields)[0]}
    except (OSError, DamagedFile):
        return None


def mark_failed(folder: Path, reason: str, root_rank: int | None) -> None:
    """Say in status.json that the run failed. Any rank may: the main one may be stuck or dead."""
    status = read_status(folder) or {**_DEFAULTS}
    if (status["state"], status["reason"]) != ("failed", reason):
        status |= {"state": "failed", "reason": reason, "root_rank": root_rank, "time": time.time()}
        _replace_status(folder / STATUS_FILE, status)


def set_running_reason(folder: Path, reason: str, root_rank: int | None) -> None:
    """Say in status.json what holds up a run that is still running: it may be killed any moment. Any rank may."""
    status = read_status(folder)
    if status is not None and status["state"] == "running":
        now = {"reason": reason, "root_rank": root_rank, "time": time.time()}
        _replace_status(folder / STATUS_FILE, status | now)


def _replace_status(path: Path, status: dict[str, Any], lasting: bool = True) -> None:
    """Replace the file. On a full disk a running attempt tries again at its next report; an end is written in place."""
    data = (json.dumps(status, indent=1) + "\n").encode()
    try:
        replace_file(path, data, lasting)
    except OSError:
        if lasting:
            overwrite_in_place(path, data)
