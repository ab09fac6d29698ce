"""What a run has cost over all its starts: goodput, what restarts have lost and kept; the job `report`, which says it.

Read from the run's files alone, also while it runs; nothing here needs torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.run_status import CRASHED_STATES, read_starts, read_status
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file
from trainer.messages import Refusal, format_count, format_duration

if TYPE_CHECKING:
    from trainer.records.run_folder import RunFolder
    from trainer.strategies.step_timing import StepTimer

_LOST = ("start", "down", "repeated", "save")  # what no step and no evaluation has of a run's time


class Report:
    """Print what a run has cost, and write it to `report/report.json`."""

    def __call__(self, folder: Path) -> int:
        """Report on this run folder; the exit code. Refusal where there is none."""
        said = costs(folder)
        if said is None:
            raise Refusal(f"job=report: {folder} holds no status.json that can be read: no run has begun there")
        refuse_unsafe_files(folder)
        out = make_folder(folder / "report")
        replace_file(out / "report.json", json.dumps(said, indent=1, ensure_ascii=False) + "\n")
        reason = f": {said['reason']}" if said["reason"] else ""
        lines = [
            f"run folder  {folder}",
            f"state       {said['state']} at step {said['step']:,}{reason}",
            *cost_lines(said),
            *start_table(said["starts"]),
            f"written     {out / 'report.json'}",
        ]
        print("\n".join(lines))
        return 0


def report(folder: RunFolder, watch: StepTimer, state: str, step: int, reason: str | None = None) -> None:
    """Say in status.json how a run stands, and what its time went into."""
    folder.report(state, step, reason, watch.laps)


def costs(folder: Path) -> dict[str, Any] | None:
    """All that the files of a run say about its time, in seconds; None where there is no status.json."""
    status = read_status(folder)
    if status is None:
        return None
    seconds = {**dict.fromkeys((*_LOST, "kept"), 0.0), **status.get("seconds", {})}
    kept = seconds.pop("kept")
    # repeated steps are inside the time of the steps, too
    whole = sum(seconds.values()) - seconds["repeated"]
    lost = {name: round(seconds[name], 3) for name in _LOST}
    executed, starts = status.get("executed", 0), _starts(folder, status)
    return {
        **{name: status[name] for name in ("state", "reason", "step", "goodput")},
        "restarts": sum(one["after"] in CRASHED_STATES for one in starts),
        "steps_executed": executed,
        "steps_repeated": executed - round(executed * status["goodput"]),
        "seconds": round(whole, 3),
        "goodput_seconds": round(1 - sum(lost.values()) / whole, 4) if whole > 0 else 1.0,
        "lost": lost,
        "kept": round(kept, 3),
        "phases": seconds,
        "starts": starts,
    }


def _starts(folder: Path, status: dict[str, Any]) -> list[dict[str, Any]]:
    """Every start: when, from which step, what the one before had come to, and what it cost until it trained."""
    lines = read_starts(folder)
    # the next line tells what a start has left; of the last one status.json does
    left = [*((line["before"] or {}) for line in lines[1:]), status]
    found: list[dict[str, Any]] = []
    earlier: dict[str, float] = {}
    for line, own in zip(lines, left, strict=False):
        before, after = line["before"] or {}, own.get("seconds") or {}
        found.append(
            {
                "attempt": line["attempt"],
                "began": line["began"],
                "resume_step": line["resume_step"],
                "after": before.get("state"),
                "because": before.get("reason"),
                "repeats": max(0, before.get("step", 0) - line["resume_step"]) if before else 0,
                **{name: round(after.get(name, 0.0) - earlier.get(name, 0.0), 3) for name in _LOST},
            }
        )
        earlier = after
    return found


def cost_lines(said: dict[str, Any]) -> list[str]:
    """What a run has cost, in a few lines for people."""
    lost, starts = said["lost"], len(said["starts"])
    words = [f"saves {spoken(lost['save'])}", f"starting {spoken(lost['start'])}"]
    if said["restarts"]:
        words += [f"down {spoken(lost['down'])}"]
        words += [f"repeating {format_count(said['steps_repeated'], 'step')} {spoken(lost['repeated'])}"]
    steps, seconds = (f"{100 * said[name]:.1f} %" for name in ("goodput", "goodput_seconds"))
    return [
        f"goodput     {steps} of the steps, {seconds} of {spoken(said['seconds'])}",
        f"lost        {', '.join(words)}",
        *(
            [
                f"restarts    {said['restarts']} of {format_count(starts, 'start')};"
                f" checkpoints kept {spoken(said['kept'])}"
            ]
            if said["restarts"]
            else []
        ),
    ]


def start_table(starts: list[dict[str, Any]]) -> list[str]:
    """A row for each start."""
    if not starts:
        return []
    rows = [f"{'start':<7} {'began':<19} {'from step':>10} {'down':>9} {'starting':>9} {'repeated':>9}  after"]
    for one in starts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["began"]))
        cells = [f"{spoken(one[name]) if one[name] else '':>9}" for name in ("down", "start", "repeated")]
        rows.append(f"{one['attempt']:<7} {when} {one['resume_step']:>10,} {' '.join(cells)}  {_after(one)}".rstrip())
    return rows


def _after(start: dict[str, Any]) -> str:
    """How the start before this one ended."""
    if start["after"] == "running":
        return f"killed: {start['because']}" if start["because"] else "killed, without a last word"
    return f"{start['after']}: {start['because']}" if start["because"] else start["after"] or ""


def spoken(seconds: float) -> str:
    """A time with as many digits as matter."""
    if seconds >= 100:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
