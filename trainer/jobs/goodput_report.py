"""The goodput of a run over all its starts: what its time went into, what restarts have lost; the job `report`.

Read from the run's files alone, also while it runs; nothing here needs torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.run_status import count_starts, read_starts, read_status
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file
from trainer.messages import Refusal, format_count, format_duration

if TYPE_CHECKING:
    from trainer.jobs.plan_comparison import PlanComparison
    from trainer.records.run_folder import RunFolder
    from trainer.strategies.step_timing import StepTimer

_LOST = ("start", "down", "repeated", "save")  # what no step and no evaluation has of a run's time


class Report:
    """Print what a run has cost, and write it to `report/report.json`."""

    def __call__(self, folder: Path) -> int:
        """Report on this run folder; the exit code. Refusal where there is none."""
        costs = read_costs(folder)
        if costs is None:
            raise Refusal(f"job=report: {folder} holds no status.json that can be read: no run has begun there")
        costs["starts"] = list_starts(folder)
        refuse_unsafe_files(folder)
        out = make_folder(folder / "report")  # a folder of its own, as every job has
        replace_file(out / "report.json", json.dumps(costs, indent=1, ensure_ascii=False) + "\n")
        reason = f": {costs['reason']}" if costs["reason"] else ""
        lines = [
            f"run folder  {folder}",
            f"state       {costs['state']} at step {costs['step']:,}{reason}",
            *cost_lines(costs),
            *start_table(costs["starts"]),
            f"written     {out / 'report.json'}",
        ]
        print("\n".join(lines))
        return 0


def write_status(
    folder: RunFolder,
    watch: StepTimer,
    comparison: PlanComparison,
    state: str,
    step: int,
    reason: str | None = None,
) -> None:
    """Write to status.json how far a run is and what its time went into; and once, what its steps have taken."""
    folder.report(state, step, reason, watch.laps)
    comparison.note(watch, ended=state != "running")


def read_costs(folder: Path) -> dict[str, Any] | None:
    """The goodput of a run and where its time went, in seconds, from its files; None where there is no status.json."""
    status = read_status(folder)
    if status is None:
        return None
    seconds = {**dict.fromkeys((*_LOST, "kept"), 0.0), **status.get("seconds", {})}
    kept = seconds.pop("kept")  # by checkpoints: what a restart did not have to repeat
    # repeated steps are inside the time of the steps, too
    whole = sum(seconds.values()) - seconds["repeated"]
    lost = {name: round(seconds[name], 3) for name in _LOST}
    # steps over all starts; goodput: the part of them that was not repeated
    executed, (starts, restarts) = status.get("executed", 0), count_starts(folder)
    return {
        **{name: status[name] for name in ("state", "reason", "step", "goodput")},
        "attempts": starts,
        "restarts": restarts,
        "steps_executed": executed,
        "steps_repeated": executed - round(executed * status["goodput"]),
        "seconds": round(whole, 3),
        "goodput_seconds": round(1 - sum(lost.values()) / whole, 4) if whole > 0 else 1.0,
        "lost": lost,
        "kept": round(kept, 3),
        "phases": seconds,
    }


def list_starts(folder: Path) -> list[dict[str, Any]]:
    """Every start: when, from which step, what the one before had come to, and what it cost until it trained."""
    lines, status = read_starts(folder), read_status(folder) or {}
    # how a start ended stands in the line of the next start, and for the last one in status.json
    endings = [*((line["before"] or {}) for line in lines[1:]), status]
    rows: list[dict[str, Any]] = []
    earlier: dict[str, float] = {}  # seconds are counted over all starts: the difference is that of one start
    for line, ending in zip(lines, endings, strict=False):
        before, after = line["before"] or {}, ending.get("seconds") or {}
        rows.append(
            {
                "attempt": line["attempt"],
                "began": line["began"],
                "resume_step": line["resume_step"],
                "after": before.get("state"),
                "because": before.get("reason"),
                # steps that an earlier start had done after the checkpoint
                "repeats": max(0, before.get("step", 0) - line["resume_step"]) if before else 0,
                **{name: round(after.get(name, 0.0) - earlier.get(name, 0.0), 3) for name in _LOST},
            }
        )
        earlier = after
    return rows


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """What a run has cost, in a few lines for people."""
    # saves and starting always; the others only where the run was restarted
    lost, starts = costs["lost"], costs["attempts"]
    parts = [f"saves {format_seconds(lost['save'])}", f"starting {format_seconds(lost['start'])}"]
    if costs["restarts"]:
        parts += [f"down {format_seconds(lost['down'])}"]
        parts += [f"repeating {format_count(costs['steps_repeated'], 'step')} {format_seconds(lost['repeated'])}"]
    steps, seconds = (f"{100 * costs[name]:.1f} %" for name in ("goodput", "goodput_seconds"))
    return [
        f"goodput     {steps} of the steps, {seconds} of {format_seconds(costs['seconds'])}",
        f"lost        {', '.join(parts)}",
        *(
            [
                f"restarts    {costs['restarts']} of {format_count(starts, 'start')};"
                f" checkpoints kept {format_seconds(costs['kept'])}"
            ]
            if costs["restarts"]
            else []
        ),
    ]


def start_table(starts: list[dict[str, Any]]) -> list[str]:
    """A row for each start."""
    if not starts:
        return []
    lines = [f"{'start':<7} {'began':<19} {'from step':>10} {'down':>9} {'starting':>9} {'repeated':>9}  after"]
    for row in starts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["began"]))
        cells = [f"{format_seconds(row[name]) if row[name] else '':>9}" for name in ("down", "start", "repeated")]
        # how the start before ended is the reason of this one
        columns = f"{row['attempt']:<7} {when} {row['resume_step']:>10,} {' '.join(cells)}  {_format_ending(row)}"
        lines.append(columns.rstrip())
    return lines


def _format_ending(start: dict[str, Any]) -> str:
    """How the start before this one ended."""
    if start["after"] == "running":
        return f"killed: {start['because']}" if start["because"] else "killed, without a last word"
    return f"{start['after']}: {start['because']}" if start["because"] else start["after"] or ""


def format_seconds(seconds: float) -> str:
    """A time with as many digits as matter."""
    # 1:40 and more as a clock shows it; below, three digits
    if seconds >= 100:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
