"""Several runs in one command (-m): one after the other, each in processes of its own, so that one fails alone.

Every rank has a parent that stays, and starts one child a run (child.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.configuration.multirun import Job, Multirun, multirun, whole_words
from trainer.launch.agreement import decided_by_main
from trainer.launch.launch import Launch
from trainer.launch.launchers import meeting_at
from trainer.launch.status import read_status
from trainer.records.folder import generated_name
from trainer.refusal import Refusal
from trainer.run.child import STOPPED, Requests, run_child


@dataclass(frozen=True)
class Ended:
    """How a job ended: the exit code that it would have had alone; None: it was not started."""

    job: Job
    code: int | None


def run_all(argv: Sequence[str], launch: Launch) -> int:
    """Run what the words of -m ask for; the exit code: 0, 75 if asked to stop, else the first failing job's.

    Refusal, before anything starts, where the words of one cannot work.
    """
    asked = multirun(argv)
    launch = meeting_at(launch, asked.init_method)
    plan = _agreed(asked, launch)
    folder, jobs = Path(plan["folder"]), [Job(**job) for job in plan["jobs"]]
    if launch.is_main:
        print(f"multirun    {len(jobs)} runs below {folder}", flush=True)
    if asked.launcher == "basic":
        ended, stopped = in_sequence(jobs, launch)
    else:
        ended, stopped = submitted(jobs, asked, folder, launch), False
    if launch.is_main:
        print("\n".join(_account(ended, folder)), flush=True)
    return _verdict(ended, stopped, launch)


def _agreed(asked: Multirun, launch: Launch) -> dict[str, Any]:
    """The folder and the jobs, decided by the main rank: the time goes into a name, and shuffle() differs by rank."""

    def decide() -> dict[str, Any]:
        folder = asked.folder or str(Path(asked.root) / generated_name("multirun", time.time()))
        folder, store = str(Path(folder).expanduser().absolute()), launch.lasting_store()
        if store is not None:  # a restarted attempt goes on in the same folder
            folder = store.compare_set(f"trainer/{launch.run_id}/multirun", "", folder).decode()
        jobs = [replace(job, words=(*whole_words(job, Path(folder)), *_here(launch, asked))) for job in asked.jobs]
        return {"folder": folder, "jobs": [vars(job) for job in jobs]}

    return decided_by_main(launch, "multirun", decide)


def _here(launch: Launch, asked: Multirun) -> list[str]:
    """Words that lead a job's processes to their parents: to the store of these, and to what a requeued job left."""
    words = ["distributed.init_method=env://"] if asked.init_method.startswith("tcp://") and launch.address else []
    return words + (["run.resume=auto"] if launch.requeued and "run.resume=fresh" in asked.jobs[0].words else [])


def in_sequence(jobs: Sequence[Job], launch: Launch) -> tuple[list[Ended], bool]:
    """One job after the other; how each ended, and whether somebody asked to stop."""
    ended: list[Ended] = []
    with Requests() as requests:
        for number, job in enumerate(jobs):
            code = None
            if not requests.stop:
                if launch.is_main and len(jobs) > 1:
                    print(f"\nrun {number + 1} of {len(jobs)}   {job.name}", flush=True)
                code = run_child(job.words, number, launch, requests)
            ended.append(Ended(job, code))
    return ended, requests.stop


def submitted(jobs: Sequence[Job], asked: Multirun, folder: Path, launch: Launch) -> list[Ended]:
    """All jobs at once, through a launcher that is a plugin of Hydra; how each ended."""
    from trainer.configuration.plugin import submit

    if launch.world_size > 1:
        raise Refusal(f"hydra/launcher={asked.launcher} starts the processes itself; start this one with python, once")
    codes = submit(asked.composed, [job.words for job in jobs], folder)
    return [Ended(job, code) for job, code in zip(jobs, codes, strict=True)]


def _account(ended: list[Ended], folder: Path) -> list[str]:
    """What became of the jobs: their number by outcome, and what went wrong with those that failed."""
    names = {0: "completed", STOPPED: "stopped", None: "not started"}
    outcomes = [names.get(each.code, "failed") for each in ended]
    counts = [f"{outcomes.count(name)} {name}" for name in (*names.values(), "failed") if name in outcomes]
    lines = ["", f"multirun    {', '.join(counts)}, below {folder}"]
    for each, outcome in zip(ended, outcomes, strict=True):
        if outcome == "failed":
            said = read_status(folder / each.job.name) or {}
            reason = (said.get("reason") if each.code == 1 else None) or "see its message above"
            lines.append(f"  {each.job.name}   exit code {each.code}: {reason.splitlines()[0]}")
    if {"stopped", "not started"} & set(outcomes):
        lines.append(f"to go on: the same command with run.dir={folder}")
    return lines


def _verdict(ended: list[Ended], stopped: bool, launch: Launch) -> int:
    """The exit code of the whole."""
    failed = [each.code for each in ended if each.code not in (0, STOPPED, None)]
    unfinished = any(each.code in (STOPPED, None) for each in ended)
    if failed and not (stopped and unfinished):
        return failed[0] or 1
    if not launch.restarts:
        return STOPPED if unfinished else 0
    from trainer.run.fit import exit_code  # a launcher that restarts what does not exit with 0

    return exit_code(not unfinished, launch)
