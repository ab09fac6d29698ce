"""The ways in: the words of a command line become the parts of a run, and `trainer.run` does one from Python.

Typos are refused before torch is imported, which takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trainer.configuration import bundle
from trainer.configuration.compose import compose, quoted
from trainer.configuration.settings import settings
from trainer.configuration.trained import opens_a_run
from trainer.configuration.words import code_words, read
from trainer.launch import failure, local
from trainer.launch.launch import Launch
from trainer.launch.launchers import launched
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch import nn

    from trainer.jobs.preparation import RunParts


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it has left."""

    state: str  # completed; preempted: stopped as asked, and saved
    metrics: dict[str, float]  # the figures of its last evaluation; empty where there was none
    folder: Path
    words: tuple[str, ...]  # that allow what the run's folder names: of labs, and of packages that are trusted

    @cached_property
    def network(self) -> nn.Module:
        """The plain network on the CPU, in evaluation mode, with the weights of the last checkpoint."""
        parts = understood([*self.words, f"run.dir={quoted(str(self.folder))}", "job=export"], Launch())
        from trainer.jobs.export import trained
        from trainer.jobs.opened import chosen

        return trained(parts, chosen(parts, "last").path, average=False)


def run(words: Sequence[str] = (), config_dir: str | Path | None = None, processes: int = 1) -> Result:
    """Do what `python -m trainer WORDS` does, from a script, a test or a notebook.

    config_dir: a lab's folder of yaml files, as --config-dir. processes: so many are started on this machine; 1: this
    one does it. Refusal where it cannot work, and the error itself where something fails; of several processes
    RuntimeError with what the first failing rank said. Ctrl-C stops and saves. Nothing here ends the process.
    """
    # the arguments are words, too: whatever is wrong with them is said as on the command line
    labs = [] if config_dir is None else ["--config-dir", str(config_dir)]
    asked = [*labs, *map(str, words), *([] if processes == 1 else [f"processes={processes}"])]
    if read(asked).multirun:
        raise Refusal("trainer.run does one run; call it for each, or use python -m trainer -m")
    with importable():
        cfg, launch = compose(asked), launched()
        count = wanted(cfg, launch)
        # the folder is chosen here, because what the run has left is looked for in it afterwards
        folder = run_folder(cfg, launch)
        asked.append(f"run.dir={quoted(str(folder))}")
        if count > 1:
            _apart(asked, count)
        else:
            _within(asked, launch)
        return Result(*_left(cfg, folder), folder, tuple(code_words(asked)))


def understood(words: Sequence[str], launch: Launch, cfg: DictConfig | None = None) -> RunParts:
    """What a run is made of; cfg: what was composed of the words already."""
    cfg = compose(words) if cfg is None else cfg
    bundle.make_importable()
    from trainer.jobs.assembly import assemble  # from here on with torch

    return assemble(cfg, words, read(words).folders, launch)


def wanted(cfg: DictConfig, launch: Launch) -> int:
    """How many processes this one is to start, by the key `processes`; 1: it does the run itself.

    Refusal where a launcher has started it.
    """
    # one that was started for this very key is not to start others
    if cfg.processes is None or launch.local:
        return 1
    if launch.world_size > 1 or launch.restarts:
        raise Refusal(
            f"processes={cfg.processes}: a launcher started this process, and decides how many there are; leave out one"
            " of the two"
        )
    if cfg.processes != "auto":
        return int(cfg.processes)
    from torch import accelerator  # only now: it takes seconds

    return max(1, accelerator.device_count())


@contextmanager
def importable() -> Iterator[None]:
    """Inside, what lies in the present folder can be imported, as with `python -m`: a lab, from its parent folder."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def run_folder(cfg: DictConfig, launch: Launch) -> Path:
    """The folder that the configuration names, or one that is named now, on all ranks the same."""
    from trainer.launch.agreement import decided_by_main
    from trainer.records.folder import choose

    label, own = str(cfg.model.get("_target_")).rsplit(".", 1)[-1].lower(), settings(cfg).run

    def decide() -> str:
        return str(choose(Path(own.root).expanduser(), own.name, own.dir, label, launch)[0])

    return Path(decided_by_main(launch, "door", decide))


def _within(words: Sequence[str], launch: Launch) -> None:
    """The run in this process, which keeps nothing of it: no log file, no lock, no group of processes, no mode."""
    import torch
    from torch import distributed

    from trainer.launch.status import mark_failed
    from trainer.records.lock import unlock_all

    handlers, strict = logging.getLogger().handlers[:], torch.are_deterministic_algorithms_enabled()
    # what the command line leaves to the end of its process is put back here, whatever happens
    try:
        parts = understood(words, launch)
        parts.job(parts)
    except failure.Failed as failed:
        error = failed.__cause__
        assert error is not None
        mark_failed(failed.folder, failure.reason(error), launch.rank)
        if distributed.is_available() and distributed.is_initialized():  # after an error nobody has waited to leave it
            distributed.destroy_process_group()
        raise error from None
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.captureWarnings(False)
        torch.use_deterministic_algorithms(strict)
        unlock_all()


def _apart(words: Sequence[str], count: int) -> None:
    """The run in processes of its own; what they have to say stands on the screen, and in the error."""
    with TemporaryDirectory(prefix="trainer-") as scratch:
        code = local.start(words, count, Path(scratch))
        said = local.account(Path(scratch))
    if code == 2:
        raise Refusal(said)
    if code not in (0, failure.STOPPED):
        raise RuntimeError(said or "a process of the run ended without a word: killed from outside, or out of memory")


def _left(cfg: DictConfig, folder: Path) -> tuple[str, dict[str, float]]:
    """What the files say: the state of the run, and its last figures."""
    from trainer.launch.status import read_status

    # a job that opens a run leaves the run's own files as they were
    opened, status = opens_a_run(cfg), read_status(folder) or {}
    lines = folder / ("evaluate" if opened else "") / "metrics.jsonl"
    every = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.is_file() else []
    last: dict[str, Any] = next((line for line in reversed(every) if line["kind"] == "eval"), {})
    figures = {name: value for name, value in last.items() if isinstance(value, float)}
    return ("completed" if opened else status.get("state", "completed")), figures
