"""Runs of `python -m trainer` on CPUs that leave behind how much memory each rank took: for memory_errors.py.

The command line trains with a task of this file, which is all that is changed: it reads /proc/self/status.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.language.next_token import NextToken
from recipes.vision.classification import Classification
from trainer import Data, Task
from trainer.jobs import fit

ROOT = Path(__file__).resolve().parents[1]
# What is freed goes back to the system at once: else glibc keeps pieces, by chance more or fewer.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Figures(NamedTuple):
    """Bytes of one process."""

    empty: int  # resident before there is a network or a group
    built: int  # at most until the first step began
    peak: int  # at most in the steps


class Watching(Task):
    """Notes on every rank how large its process is."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        for name in os.environ.get("MEMORY_IMPORTS", "").split():  # what a network imports is no memory of a step
            importlib.import_module(name)
        if os.environ.keys() >= EXACT.keys():  # a run has a choice of its own for glibc, which would replace this one
            fit.keep_freed_memory = fit.give_back_freed_memory = lambda: True
        self._empty, self._built = read_status("VmRSS"), 0

    def weight(self, target: Tensor) -> Tensor | int:
        """Samples, as usual; a step asks for this first."""
        if not self._built:
            self._built = read_status("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM is from now on that of the steps
        return super().weight(target)

    def after_step(self, network: nn.Module, step: int) -> None:
        """Leave the figures in a file of this rank; a plan, which has no real steps, leaves none."""
        if folder := os.environ.get("MEMORY_FIGURES"):
            figures = Figures(self._empty, self._built, read_status("VmHWM"))
            (Path(folder) / os.environ.get("RANK", "0")).write_text(json.dumps(figures))


class Watched(Watching, Classification):
    """Images, or texts of a class."""


class WatchedTokens(Watching, NextToken):
    """Sequences."""


class TokenClasses(Data):
    """Random texts of one length with a class each, as networks of transformers take them."""

    def __init__(self, size: int, length: int, vocab_size: int, num_classes: int, **_: Any) -> None:
        self.length, self.vocab_size, self.num_classes = length, vocab_size, num_classes
        self._tokens = torch.arange(size * length).view(size, length) % vocab_size

    def train(self) -> Any:
        """Inputs {input_ids, attention_mask}, int64 (length,) each; a class."""
        mask = torch.ones(self._tokens.shape[1], dtype=torch.int64)
        return [({"input_ids": text, "attention_mask": mask}, int(text[0]) % self.num_classes) for text in self._tokens]

    def evaluation(self) -> None:
        """None."""


def read_status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def train(arguments: str, processes: int, imports: str = "", exact: bool = False) -> list[Figures]:
    """Train; the figures of each rank. exact: what is in use, without what glibc keeps beside it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with TemporaryDirectory() as folder:
        more = {"MEMORY_FIGURES": folder, "MEMORY_IMPORTS": imports, **(EXACT if exact else {})}
        _trainer([*arguments.split(), f"run.dir={folder}/run"], more, launcher if processes > 1 else [])
        return [Figures(*json.loads((Path(folder) / str(rank)).read_text())) for rank in range(processes)]


def plan(arguments: str, processes: Sequence[int], strategies: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of job=plan for this run."""
    with TemporaryDirectory() as folder:
        job = [f"job.processes=[{','.join(map(str, processes))}]", "job.seconds=600", f"run.dir={folder}/run"]
        job += [f"job.strategies=[{','.join(strategies)}]"] if strategies else []
        _trainer([*arguments.split(), "job=plan", *job], {}, [])
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "run/plan/plan.json").read_text())["rows"]
        return rows


def _trainer(arguments: list[str], more: dict[str, str], launcher: list[str]) -> None:
    """Run the command line, with a task of this file at hand."""
    command = [sys.executable, *launcher, "-m", "trainer", *arguments]
    needed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = subprocess.run(command, env={**os.environ, **needed, **more}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
