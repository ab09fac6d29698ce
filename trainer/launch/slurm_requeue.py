"""Puts a job of Slurm back into the queue when its run is to go on: by itself Slurm runs again only what it kills.

A preempted job gets SIGTERM and the `GraceTime` of its partition. A run saves and ends in seconds, and a job that ends
is done for Slurm, whatever is left to train. The last line of a batch script asks for another start where that is
meant: `python -m trainer.launch.slurm_requeue CODE SECONDS` (scripts/slurm). Never for a job that was cancelled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping

_COMMAND_TIMEOUT = 60.0  # seconds for an answer of Slurm
_LOST_MACHINE_SECONDS = (
    1200.0  # seconds in which Slurm has noticed that a machine is gone: SlurmdTimeout, 300 by default
)


def requeue_if_unfinished(code: int, lead: float = 0.0, env: Mapping[str, str] = os.environ) -> bool:
    """Is Slurm to run this process's job again, which ended with this exit code? Where it must be asked, it is asked.

    It is asked for a job that was preempted, and for one that has saved (75) in the last `lead` seconds of its time.
    """
    if not env.get("SLURM_JOB_ID") or code in (0, 2):
        return False
    job = _show_job(_job_name(env))
    # asked by another process of the job already, or Slurm itself has ended it for another start
    if int(job.get("Restarts", 0)) > int(env.get("SLURM_RESTART_COUNT") or 0):
        return True
    # what was cancelled is ending, too, and would be started again if that was asked for; so would one of --no-requeue
    if job.get("JobState") != "RUNNING":
        return False
    if why := _requeue_reason(job, code, lead):
        return (
            _request_requeue(env, why)
            if job.get("Requeue") == "1"
            else _report(f"{why}; --no-requeue: submit it again", False)
        )
    return False


def _requeue_reason(job: Mapping[str, str], code: int, lead: float) -> str:
    """Why the job is to run again, in words; empty: it is not."""
    if job.get("PreemptTime", "None") not in ("None", "N/A"):
        return "preempted"
    ends = job.get("EndTime", "")
    near = ends.isdecimal() and time.time() >= int(ends) - lead
    return "the time limit is near" if near and code == 75 else ""


def _show_job(number: str) -> dict[str, str]:
    """The fields of a job by name, times in seconds since 1970; nothing where Slurm does not answer."""
    answer = _run_slurm_command("scontrol", "show", "job", number, env={**os.environ, "SLURM_TIME_FORMAT": "%s"})
    # users write the name of a job, in the first line, and its comment, behind all fields that are read here: of
    # several fields of one name the first is Slurm's
    lines = answer.stdout.splitlines()[1:]
    return dict(re.findall(r"(\w+)=(\S*)", "\n".join(reversed(lines))))


def _job_name(env: Mapping[str, str]) -> str:
    """What Slurm calls this job. The number of an array's last job is also that of the array: all jobs in it."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def _request_requeue(env: Mapping[str, str], why: str) -> bool:
    if env.get("SLURM_PROCID", "0") != "0":  # the first task does it for all
        return True
    ended = _run_slurm_command("scontrol", "requeue", _job_name(env))
    if ended.returncode:
        return _report(f"{why}, but Slurm does not run it again: {ended.stderr.strip()}", False)
    return _report(f"{why}; Slurm runs it again", True)


def _report(message: str, answer: bool) -> bool:
    print(f"job         {message}", flush=True)
    return answer


def _run_slurm_command(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def wait_for_lost_machine(env: Mapping[str, str] = os.environ) -> None:
    """If a machine of the job is gone, stay until Slurm has noticed: it ends and requeues this job then, but no sooner.

    The ranks notice in seconds. A job that ends with their failure would not be run again.
    """
    machines = env.get("SLURM_JOB_NUM_NODES", "1")
    # a step on every machine, beside whatever still runs there
    step = ("srun", "--overlap", f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1", "true")
    if machines != "1" and "launch failed" in _run_slurm_command(*step).stderr:
        _report("a machine does not answer; waiting until Slurm has noticed it, and runs this job again", True)
        time.sleep(_LOST_MACHINE_SECONDS)


if __name__ == "__main__":
    ended_with, seconds = int(sys.argv[1]), float(sys.argv[2])
    if not requeue_if_unfinished(ended_with, seconds) and ended_with not in (0, 2, 75):
        wait_for_lost_machine()
