"""starts.jsonl: what each start of a run began with, and what the one before had left; seconds over all of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from trainer.launch.file_validation import START, Damaged
from trainer.launch.no_symlinks import open_file

NAME = "starts.jsonl"
CRASHED = ("running", "failed")  # states of a start that did not end as it was asked to: the next one is a restart


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


def inherited(before: Mapping[str, Any], resume_step: int, began: float) -> dict[str, float]:
    """The seconds of earlier starts by what they went into, and what this restart costs so far.

    before: the last status.json. `down`: from its last word to this start; `repeated`: of steps that no checkpoint had;
    `kept`: of steps that a restart did not have to do again, which is no time of its own.
    """
    spent = {"down": 0.0, "repeated": 0.0, "kept": 0.0, **before.get("seconds", {})}
    if before.get("state") in CRASHED and "time" in before:
        spent["down"] += max(0.0, began - before["time"])
        # how long a step took is known of that start as a whole
        step_s = before.get("step_s", 0.0)
        spent["repeated"] += step_s * max(0, before["step"] - resume_step)
        spent["kept"] += step_s * max(0, resume_step - before.get("first_step", 0))
    return spent


def add_start(folder: Path, facts: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Append a line about this start, with what the one before has left in status.json."""
    left = None
    if before:
        left = {name: before.get(name) for name in ("state", "reason", "step", "time", "seconds")}
    line = json.dumps({**facts, "before": left}).encode() + b"\n"
    # an account, without which the run is as good; in one call, as others may read meanwhile
    with suppress(OSError), open_file(folder / NAME, "a+b", buffering=0) as file:
        # half a line, which a kill or a full disk has left there, must not take this one along
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The lines; one that a full disk or somebody else has spoilt is left out."""
    path, found = folder / NAME, []
    with open_file(path, "rb") if path.is_file() else nullcontext(()) as lines:
        for line in lines:
            with suppress(ValueError, RecursionError, Damaged):
                START(said := json.loads(line), "")
                found.append(said)
    return found
