"""Several runs in one command (-m): one after the other, each in processes of its own, so that one fails alone.

Every rank has a parent that stays, and starts one child a run. What a run leaves in a process (memory of a device, a
group that hangs, an aborted NCCL) goes with its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.configuration.multirun import Job, Multirun, multirun, whole_words
from trainer.launch.agreement import decided_by_main
from trainer.launch.failure import STOPPED, exit_code
from trainer.launch.launch import Launch
from trainer.launch.launchers import meeting_at
from trainer.launch.local import meaning
from trainer.launch.signals import StopRequest
from trainer.launch.status import read_status
from trainer.records.folder import choose
from trainer.refusal import Refusal

_LOOK = 0.2  # seconds between two looks at the child and at the store
_GRACE = 30.0  # seconds that a child has after SIGTERM where its run is lost


Ended = dict[str, int | None]  # a job's name: the exit code that it would have had alone; None: it was not started


def run_all(argv: Sequence[str], launch: Launch) -> int:
    """Run what the words of -m ask for; the exit code: 0, 75 if asked to stop, else the first failing job's.

    Refusal, before anything starts, where the words of one cannot work.
    """
    # What cannot work is refused by every rank for itself, with one sentence, before they meet.
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
        # a restarted attempt goes on in the same folder
        folder, _ = choose(Path(asked.root).expanduser(), asked.name, asked.dir, "multirun", launch)
        # words that lead a job's processes to their parents' store, and to what a requeued job left
        here = ["distributed.init_method=env://"] if asked.init_method.startswith("tcp://") and launch.address else []
        here += ["run.resume=auto"] if launch.requeued and "run.resume=fresh" in asked.jobs[0].words else []
        jobs = [replace(job, words=(*whole_words(job, folder), *here)) for job in asked.jobs]
        return {"folder": str(folder), "jobs": [vars(job) for job in jobs]}

    return decided_by_main(launch, "multirun", decide)


def in_sequence(jobs: Sequence[Job], launch: Launch) -> tuple[Ended, bool]:
    """One job after the other; how each ended, and whether somebody asked to stop."""
    ended: Ended = {}
    stop = False
    with StopRequest(launch) as request:
        for number, job in enumerate(jobs):
            code = None
            if not stop:  # as all ranks have heard from each other, so that none waits for another's process
                if launch.is_main and len(jobs) > 1:
                    print(f"\nrun {number + 1} of {len(jobs)}   {job.name}", flush=True)
                code, stop = run_child(job.words, number, launch, request)
            ended[job.name] = code
    return ended, stop


def submitted(jobs: Sequence[Job], asked: Multirun, folder: Path, launch: Launch) -> Ended:
    """All jobs at once, through a launcher that is a plugin of Hydra; how each ended."""
    from trainer.configuration.plugin import submit

    if launch.world_size > 1:
        raise Refusal(f"hydra/launcher={asked.launcher} starts the processes itself; start this one with python, once")
    codes = submit(asked.composed, [job.words for job in jobs], folder)
    return dict(zip((job.name for job in jobs), codes, strict=True))


def _account(ended: Ended, folder: Path) -> list[str]:
    """What became of the jobs: their number by outcome, and what went wrong with those that failed."""
    names = {0: "completed", STOPPED: "stopped", None: "not started"}
    outcomes = [names.get(code, "failed") for code in ended.values()]
    counts = [f"{outcomes.count(name)} {name}" for name in (*names.values(), "failed") if name in outcomes]
    lines = ["", f"multirun    {', '.join(counts)}, below {folder}"]
    for name, code in ended.items():
        if code not in names:
            said = read_status(folder / name) or {}
            reason = (said.get("reason") if code == 1 else None) or "see its message above"
            lines.append(f"  {name}   exit code {code}: {reason.splitlines()[0]}")
    if {"stopped", "not started"} & set(outcomes):
        lines.append(f"to go on: the same command with run.dir={folder}")
    return lines


def _verdict(ended: Ended, stopped: bool, launch: Launch) -> int:
    """The exit code of the whole."""
    failed = [code for code in ended.values() if code not in (0, STOPPED, None)]
    unfinished = any(code in (STOPPED, None) for code in ended.values())
    if failed and not (stopped and unfinished):
        return failed[0] or 1
    return exit_code(not unfinished, launch)


# ----------------------------------------------------------------------------------------------------------- one child


def run_child(words: Sequence[str], number: int, launch: Launch, request: StopRequest) -> tuple[int, bool]:
    """Collective: every rank starts its process of the job and waits for all; what the job's exit code means.

    The second value: was anybody asked to stop, so that no further job should start?
    """
    # A launcher's processes end with 0 when they were stopped as asked: the file tells the code that was meant.
    with TemporaryDirectory(prefix="trainer-job-") as scratch:
        ending = Path(scratch) / "ending"
        environment = _environment(launch, number, ending)
        child = subprocess.Popen([sys.executable, "-m", "trainer", *words], env=environment)
        code = _wait(child, number, launch, request)
        if code == 0 and ending.exists():
            code = int(ending.read_text())

    # The first failing job's account goes where torchrun looks for this process's.
    if code not in (0, STOPPED) and launch.address and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        account = Path(environment["TORCHELASTIC_ERROR_FILE"])
        if account.is_file() and not Path(file).exists():
            shutil.copyfile(account, file)
    codes, stop = _told(code, number, launch, request.raised)
    return meaning(codes, stop), stop


def _environment(launch: Launch, number: int, ending: Path) -> dict[str, str]:
    """What torchrun would export, for one job: the same store, but keys and an error file of its own."""
    environment = {**os.environ, "TRAINER_EXIT_FILE": str(ending)}
    if not launch.address:
        return environment
    if not launch.address.startswith("file://"):
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = launch.address.rsplit(":", 1)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    if file != Path(os.devnull):
        # beside the other ranks' of this job: they look there for what the main rank has said
        file = file.parent.parent / f"job-{number}" / str(launch.local_rank) / file.name
        file.parent.mkdir(parents=True, exist_ok=True)
    return environment | {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "TORCHELASTIC_RUN_ID": f"{launch.run_id or 'multirun'}-{number}",
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parents' store, which outlives every job
        "TORCHELASTIC_ERROR_FILE": str(file),
    }


def _wait(child: subprocess.Popen[bytes], number: int, launch: Launch, request: StopRequest) -> int:
    """The child's exit code. A request to stop is passed on; where the run is lost the child has a while to end."""
    asked, deadline = False, float("inf")
    while True:
        try:
            return child.wait(_LOOK)
        except subprocess.TimeoutExpired:
            lost = _lost(launch, number)
            # Whatever the request was: a second SIGINT, after the terminal's own, would end the child at once.
            if (lost or request.raised) and not asked:
                child.terminate()
                asked = True
            deadline = min(deadline, time.monotonic() + _GRACE) if lost else deadline
            if time.monotonic() > deadline:
                child.kill()


def _lost(launch: Launch, number: int) -> bool:
    """Has another rank's process of this job failed, or the store gone with its launcher? Never waits."""
    store = launch.store()
    try:
        return store is not None and store.check([f"job-{number}/failed"])
    except RuntimeError:
        return True


def _told(code: int, number: int, launch: Launch, asked: bool) -> tuple[list[int], bool]:
    """Collective, through the store: the exit codes of all ranks' processes, and was any rank asked to stop?"""
    store = launch.store()
    if store is None:
        return [code], asked
    # Every rank writes [exit code, asked to stop?] under its key and waits until it can read all of them.
    keys = [f"job-{number}/rank-{rank}" for rank in range(launch.world_size)]
    try:
        if code not in (0, STOPPED):
            store.set(f"job-{number}/failed", "yes")
        store.set(keys[launch.rank], json.dumps([code, asked]))
        answers = [json.loads(answer) for answer in store.multi_get(keys)]
    except RuntimeError:  # the store went with its launcher
        return [code], True
    return [code for code, _ in answers], any(asked for _, asked in answers)
