"""The reference that `verify` compares with: the same words, done by one process of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.jobs.report import quoted
from trainer.launch.launchers import unlaunched
from trainer.refusal import Refusal

_LAST = 2000  # characters of what a process that failed said last


_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|cannot allocate memory|bad_alloc|MemoryError", re.I)


def made_apart(words: Sequence[str], samples: int, path: Path, layers: int | None) -> str:
    """Have the reference of a run with these words, and so many samples in a step, written to a file.

    layers: so many of each kind; None: all. What is given back is how its memory ran out; empty where it did not.
    Refusal with its own account where something else fails.
    """
    # after the last word that changes a key: flags may not stand between them
    keys = ("processes=", "job.reference=", "job.batch=", "job.layers=")
    own = [word for word in words if not word.startswith(keys)]
    overrides = [at for at, word in enumerate(own) if "=" in word and not word.startswith("-")]
    at = overrides[-1] + 1 if overrides else len(own)
    command = [
        sys.executable,
        "-m",
        "trainer",
        *own[:at],
        f"job.batch={samples}",
        f"job.record={quoted(path)}",
        f"job.layers={layers or 'all'}",
        *own[at:],
    ]
    here = os.pathsep.join(part for part in sys.path if part)  # what can be imported here can be imported there
    told = subprocess.run(
        command,
        env=unlaunched(os.environ) | {"PYTHONPATH": here, "TRAINER_PARENT": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if not told.returncode:
        return ""
    said = told.stdout.strip()[-_LAST:]
    if told.returncode == 2:
        raise Refusal(said)
    if told.returncode == -signal.SIGKILL or _NO_MEMORY.search(said):
        return (said or "killed").splitlines()[-1]
    raise Refusal(f"job=verify: the same words on one process fail:\n{said}")
