"""The reference that `verify` compares with: the same words, done by one process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.jobs.report import quoted
from trainer.launch.launchers import unlaunched
from trainer.refusal import Refusal

_LAST = 2000  # characters of what a process that failed said last


def made_apart(words: Sequence[str], samples: int, path: Path) -> None:
    """Have the reference of a run with these words, and so many samples in a step, written to a file.

    Refusal with its own account where that fails.
    """
    # after the last word that changes a key: flags may not stand between them
    own = [word for word in words if not word.startswith(("processes=", "job.reference=", "job.batch="))]
    overrides = [at for at, word in enumerate(own) if "=" in word and not word.startswith("-")]
    at = overrides[-1] + 1 if overrides else len(own)
    command = [
        sys.executable,
        "-m",
        "trainer",
        *own[:at],
        f"job.batch={samples}",
        f"job.record={quoted(path)}",
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
        return
    said = told.stdout.strip()[-_LAST:]
    if told.returncode == 2:
        raise Refusal(said)
    if told.returncode < 0 or "out of memory" in said.lower() or "can't allocate memory" in said:
        raise Refusal(
            f"job=verify: the reference does not fit into one process: {(said or 'killed').splitlines()[-1]}. Make the"
            " network smaller by a key of its own (fewer layers, a smaller width), or loop.global_batch. What holds for"
            " a few layers holds for all that are like them"
        )
    raise Refusal(f"job=verify: the same words on one process fail:\n{said}")
