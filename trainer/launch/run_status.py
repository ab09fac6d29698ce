"""status.json: the state of a run, and how it ended; starts.jsonl: a line for each of its starts."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from trainer.launch.safe_files import open_file, overwrite_in_place, replace_file
from trainer.launch.typed_values import DamagedFile, Finite, Text, Whole, check_fields, form, mapping_of, read_json
from trainer.messages import Refusal

STATUS_FILE = "status.json"
STARTS_FILE = "starts.jsonl"
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

Seconds = Annotated[dict[str, float], mapping_of(Text, Finite)]  # by phase


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
    step_s: NotRequired[Finite]
    seconds: NotRequired[Seconds]
    reason: NotRequired[Text | None]
    strategy: NotRequired[Text | None]
    host: NotRequired[Text | None]
    root_rank: NotRequired[Whole | None]
    world_size: NotRequired[Whole | None]


class LastStatus(TypedDict):
    """What the attempt before had left in status.json."""

    state: Text
    step: Whole
    reason: NotRequired[Text | None]
    time: NotRequired[Finite]
    seconds: NotRequired[Seconds]


class StartFields(TypedDict):
    """A line of starts.jsonl, as far as it is read."""

    attempt: Whole
    began: Finite
    resume_step: Whole
    before: NotRequired[LastStatus | None]


class StatusWriter:
    """Writes the status of one attempt; counts the attempts, and the steps of all of them.

    Goodput is distinct useful steps / steps executed. The steps of an attempt that was killed are those it had
    reported last, or those it had saved.
    """

    def __init__(self, folder: Path, resume_step: int, world_size: int, strategy: str, age: float = 0.0) -> None:
        """age: seconds since this start began."""
        before = read_status(folder) or {}
        if not before and (folder / STATUS_FILE).exists():
            log.warning("damaged: %s; starts are counted from 1 again", folder / STATUS_FILE)
        self._path = folder / STATUS_FILE
        # a checkpoint may be newer than the last report, which comes once a second at most: its steps were done, too
        self._executed = before.get("executed", 0) + max(0, resume_step - before.get("step", resume_step))
        self._reported = -math.inf  # when, by the clock
        began, self._since = time.time() - age, time.monotonic() - age
        self._inherited = earlier_seconds(before, resume_step, began)
        start = {
            "resume_step": resume_step,
            "world_size": world_size,
            "strategy": strategy,
            "attempt": before.get("attempt", 0) + 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._facts = {**start, "first_step": before.get("first_step", resume_step)}
        append_start(folder, {**start, "began": began}, before)

    def write(self, state: str, step: int, reason: str | None, spent: Mapping[str, float] | None = None) -> None:
        """Replace status.json; while the run goes on, once a second. The end must survive a power cut.

        spent: the seconds of this start by phase, as far as they are measured; the others were its beginning.
        """
        if state == "running" and time.monotonic() < self._reported + REPORT_INTERVAL:
            return
        self._reported = time.monotonic()
        done, useful = step - self._facts["resume_step"], step - self._facts["first_step"]
        executed = self._executed + done
        status = {
            "state": state,
            "reason": reason,
            "root_rank": None,
            "step": step,
            "goodput": round(useful / executed, 4) if executed > 0 else 1.0,
            "executed": executed,
            "time": time.time(),
            **self._seconds(spent or {}, done),
            **self._facts,
        }
        _replace_status(self._path, status, lasting=state != "running")

    def _seconds(self, spent: Mapping[str, float], steps: int) -> dict[str, Any]:
        """The seconds of all starts by phase; and how long a step took in this one, with what is done between steps."""
        # what is left of this start's time was its beginning
        in_steps = sum(seconds for name, seconds in spent.items() if name != "save")
        step_s = in_steps / steps if steps > 0 else 0.0
        start = time.monotonic() - self._since - sum(spent.values())
        here = {"start": start, **spent}
        names = self._inherited | here
        total = {name: round(self._inherited.get(name, 0.0) + here.get(name, 0.0), 3) for name in names}
        return {"seconds": total, "step_s": round(step_s, 6)}


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


CRASHED_STATES = ("running", "failed")  # of a start that did not end as it was asked to: the next one is a restart


def process_age() -> float:
    """Seconds since this process began, its imports included; 0 where the system does not tell.

    A rank that was forked at the beginning of its command is as old as that: the imports are the command's.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        # the name of the program, in brackets, may hold anything; the 20th number behind it is the start since boot
        ticks = int(stat.rsplit(")", 1)[1].split()[19])
        age = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
        return age + float(os.environ.get("TRAINER_AGE", 0))
    except (OSError, AttributeError):
        return 0.0


def earlier_seconds(before: Mapping[str, Any], resume_step: int, began: float) -> dict[str, float]:
    """The seconds of earlier starts by what they went into, and what this restart costs so far.

    before: the last status.json. `down`: from its last word to this start; `repeated`: of steps that no checkpoint had;
    `kept`: of steps that a restart did not have to do again, which is no time of its own.
    """
    spent = {"down": 0.0, "repeated": 0.0, "kept": 0.0, **before.get("seconds", {})}
    if before.get("state") in CRASHED_STATES and "time" in before:
        spent["down"] += max(0.0, began - before["time"])
        # how long a step took is known of that start as a whole
        step_s = before.get("step_s", 0.0)
        spent["repeated"] += step_s * max(0, before["step"] - resume_step)
        spent["kept"] += step_s * max(0, resume_step - before.get("first_step", 0))
    return spent


def append_start(folder: Path, facts: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Append a line about this start, with what the one before has left in status.json."""
    left = None
    if before:
        left = {name: before.get(name) for name in ("state", "reason", "step", "time", "seconds")}
    line = json.dumps({**facts, "before": left}).encode() + b"\n"
    # a run without this line is as good; written in one call, as others may read meanwhile
    with suppress(OSError), open_file(folder / STARTS_FILE, "a+b", buffering=0) as file:
        # half a line, which a kill or a full disk has left there, must not spoil this one
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def count_starts(folder: Path) -> tuple[int, int]:
    """How many starts there are lines of, and how many of them came after a crash.

    For the end of every start, so no line is parsed: of a hundred thousand that would take ten seconds.
    """
    path, starts, restarts = folder / STARTS_FILE, 0, 0
    needles = [f'"before": {{"state": "{state}"'.encode() for state in CRASHED_STATES]
    with open_file(path, "rb") if path.is_file() else nullcontext(()) as lines:
        for line in lines:
            starts += line.endswith(b"}\n")
            restarts += any(needle in line for needle in needles)
    return starts, restarts


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The lines; a line that a full disk or somebody else has spoilt is left out."""
    path, starts = folder / STARTS_FILE, []
    with open_file(path, "rb") if path.is_file() else nullcontext(()) as lines:
        for line in lines:
            with suppress(ValueError, RecursionError, Refusal):
                starts.append(check_fields(json.loads(line), StartFields))
    return starts
