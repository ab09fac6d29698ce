"""The reference that `verify` compares with: one process of its own has it made, and what that one does."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from trainer.jobs.memory_arithmetic import refuse_unbuilt, shortage, unheld
from trainer.jobs.preparation import Prepared, RunParts
from trainer.jobs.run_messages import quoted
from trainer.jobs.verification_run import exactly, surveyed, trial
from trainer.launch.agreement import decided_by_main
from trainer.launch.launchers import unlaunched
from trainer.launch.stop_signals import StopRequest
from trainer.proof.comparison import exactness, floors
from trainer.proof.noise_floor import shake
from trainer.proof.record import Record
from trainer.refusal import Refusal

Layers = int | Literal["all"] | None  # so many of each kind; None: all, or what one process can hold

_LAST = 2000  # characters of what a process that failed said last
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|cannot allocate memory|bad_alloc|MemoryError", re.I)


def made_apart(run: RunParts, samples: int, path: Path, layers: int | None) -> str:
    """Have the reference of a run with so many samples in a step written to a file.

    layers: so many of each kind; None: all. What is given back is how its memory ran out; empty where it did not.
    Refusal with its own account where something else fails.
    """
    # after the last word that changes a key: flags may not stand between them
    keys = ("processes=", "job.reference=", "job.batch=", "job.layers=")
    own = [word for word in run.words if not word.startswith(keys)]
    overrides = [at for at, word in enumerate(own) if "=" in word and not word.startswith("-")]
    at = overrides[-1] + 1 if overrides else len(own)
    added = [f"job.batch={samples}", f"job.record={quoted(path)}", f"job.layers={layers or 'all'}"]
    here = os.pathsep.join(part for part in sys.path if part)  # what can be imported here can be imported there
    environment = unlaunched(os.environ) | {"PYTHONPATH": here, "TRAINER_PARENT": str(os.getpid())}
    code, printed = run.alone([*own[:at], *added, *own[at:]], environment)
    if not code:
        return ""
    said = printed.strip()[-_LAST:]
    if code == 2:
        raise Refusal(said)
    if code == -signal.SIGKILL or _NO_MEMORY.search(said):
        return (said or "killed").splitlines()[-1]
    raise Refusal(f"job=verify: the same words on one process fail:\n{said}")


def given(path: Path) -> Record:
    """The reference that somebody has had made. Refusal where the file is none."""
    if not path.is_file():
        raise Refusal(f"job.reference={path}: there is no such file; job.record={path} writes it")
    with suppress(SafetensorError, KeyError):
        if "fewer" in (reference := Record.read(path)).facts:
            return reference
    raise Refusal(f"job.reference={path} is no reference, or an older version has written it; job.record={path} does")


def have_made(run: Prepared, samples: int, path: Path, asked: Layers) -> str:
    """Collective: the reference in a file, with fewer layers where one process cannot hold all; why it has fewer.

    samples: in a step. asked: `job.layers`.
    """
    launch = run.machine.launch
    least = max(2, run.strategy.least_layers(launch.world_size))

    def made() -> str:
        """The main rank's."""
        layers, why = how_few(run, asked, least)
        lack = made_apart(run, samples, path, layers)
        if lack and asked is None and layers is None:
            why = f"the reference with all of them ran out of memory ({lack})"
            lack = made_apart(run, samples, path, least)
        if lack:
            raise Refusal(unheld(run, why, lack, asked))
        return why

    return str(decided_by_main(launch, "reference", made))


def how_few(run: Prepared, asked: Layers, least: int) -> tuple[int | None, str]:
    """How many layers of each kind a proof is to have, None: all of them; and why so few."""
    if asked is not None:
        return (None, "") if asked == "all" else (int(asked), f"job.layers={asked}")
    why = shortage(run)
    if why:
        refuse_unbuilt(run)
    return (least, why) if why else (None, "")


def recorded(run: Prepared, ends: Sequence[int], tolerance: float, stop: StopRequest) -> tuple[Record, bool]:
    """What this one process does in fp64, or in fp32 where it cannot; False: somebody asked to stop.

    ends: the step after which others resume, and the last one.
    """
    try:
        return _twice(run, ends, tolerance, stop, "fp64", "")
    except (RuntimeError, TypeError, ValueError) as error:
        because = f"{error}".strip().partition("\n")[0]
        if _NO_MEMORY.search(because):
            raise
    # what fails here as well is no question of the precision
    return _twice(run, ends, tolerance, stop, "fp32", because)


def _twice(
    run: Prepared, ends: Sequence[int], tolerance: float, stop: StopRequest, precision: str, because: str
) -> tuple[Record, bool]:
    """All of it twice, the second time with all weights moved by a last bit: so far does rounding alone carry it.

    because: why it is not done in a wider precision.
    """
    half, last = ends
    with exactly(run, precision):
        layouts = surveyed(run)
        record, shaken = Record(layouts=layouts), Record(layouts=layouts)
        done = trial(run, record, [last], stop, resume=half)
        done = done and trial(run, shaken, [last], stop, resume=half, shake=shake(precision))
    record.floors = floors(record, shaken, exactness(precision, tolerance)) if done else {}
    record.facts = {"precision": precision, "because": because, "samples": run.settings.loop.global_batch}
    return record, done
