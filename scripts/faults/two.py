"""One configuration trained twice: undisturbed, and while faults strike."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from scripts.faults import inside
from scripts.faults.command import Command, Start
from scripts.faults.disk import Disk
from scripts.faults.driven import Driven
from scripts.faults.left import Left
from scripts.faults.plan import draw
from scripts.faults.possible import impossible
from scripts.faults.strikes import STRIKES
from trainer.configuration.compose import compose, quote_value
from trainer.configuration.resource_paths import working_directory_importable
from trainer.messages import Refusal

DISK, INSIDE, TEMPORARY = "disk", "inside", "tmp"  # folders: a disk of its own; what asks the task; TMPDIR of each run
QUIET, RUN = "undisturbed", f"{DISK}/run"  # the folders of the runs
LINES = "loop.log_every=1"  # every step is compared
STEP_TIMEOUT = "distributed.step_timeout=10"  # seconds; or a rank that hangs would cost ten minutes


def both(
    asked: Namespace, words: Sequence[str], folder: Path, disk: Disk, start: Start
) -> tuple[Driven, Driven, dict[str, str]]:
    """The undisturbed run, the other one, and why some kinds of faults cannot strike it.

    Refusal where the words cannot work, Stuck where the same command again does not heal the run.
    """
    kinds = wanted(asked.kinds)
    if chosen := [word for word in words if word.startswith(("run.", "processes="))]:
        raise Refusal(f"{chosen[0]}: the folder is chosen here, and --processes says how many; leave it out")
    with working_directory_importable():  # a lab in this folder
        cfg = compose(words)
    inside.write(folder, cfg.task._target_)
    # what strikes inside is part of both runs, or they would not have one configuration
    added = [f"task._target_={inside.TASK}", f"trust=[{','.join([*cfg.trust, inside.PACKAGE])}]"]
    defaults = [word for word in (LINES, STEP_TIMEOUT) if not any(one.startswith(word.split("=")[0]) for one in words)]
    begin = partial(command, start, asked, [*words, *defaults, *added], folder)

    undisturbed = Driven(partial(begin, QUIET), Left(folder / QUIET))
    undisturbed.run()
    steps, strategy = undisturbed.left.step(), undisturbed.left.status()["strategy"]
    left_out = impossible(cfg, asked.processes, strategy, undisturbed.workers, disk.can_fill)
    possible = [kind for kind in kinds if kind not in left_out]
    count = asked.faults if asked.faults is not None else steps // asked.every
    faults = draw(steps, count, possible, asked.seed) if possible else []
    run = Driven(partial(begin, RUN), Left(folder / RUN), disk, folder / INSIDE, Random(asked.seed))
    run.run(faults)
    return undisturbed, run, {kind: left_out[kind] for kind in kinds if kind in left_out}


def wanted(kinds: str | None) -> list[str]:
    """The kinds that were asked for. Refusal where there is no such kind."""
    named = kinds.split(",") if kinds else list(STRIKES)
    if unknown := [kind for kind in named if kind not in STRIKES]:
        raise Refusal(f"--kinds: there is no {', '.join(unknown)}; there are {', '.join(STRIKES)}")
    return named


def command(start: Start, asked: Namespace, words: Sequence[str], folder: Path, path: str, number: int) -> Command:
    """The command of a run, started for the so-and-so-many-th time: always the same."""
    own = [*words, f"run.dir={quote_value(str(folder / path))}"]
    module = ["-m", "trainer", *own]
    if asked.max_restarts is not None:
        flags = [f"--nproc-per-node={asked.processes}", f"--max-restarts={asked.max_restarts}"]
        module = ["-m", "torch.distributed.run", "--standalone", *flags, *module]
    elif asked.processes > 1:
        module.append(f"processes={asked.processes}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TMPDIR": str(folder / TEMPORARY / path),
        inside.FOLDER: str(folder / INSIDE),
    }
    return Command(start, [sys.executable, *module], environment, folder / f"{path.replace('/', '-')}-{number}.screen")
