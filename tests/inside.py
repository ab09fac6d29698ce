"""The command line's own path, taken inside this process or inside a rank of the group that stays: no launch to pay."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from trainer.__main__ import understood
from trainer.configuration.words import read
from trainer.launch import failure
from trainer.launch.launch import Launch
from trainer.records import lock
from trainer.run.sweep import run_all


def product(launch: Launch, place: Path, words: list[str]) -> int:
    """What `python -m trainer …` does in the folder `place`; the exit code. Leaves nothing switched on."""
    before, handlers = os.getcwd(), logging.getLogger().handlers[:]
    os.chdir(place)
    try:
        # the one would end the process; the other keep for all tests what the largest network has freed
        with patch.object(failure, "fail", _raised), patch("trainer.run.fit.keep_freed_memory"):
            words = ["device=cpu", "log=[]", *words]
            if read(words).multirun:
                return run_all(words, launch)
            run = understood(words, launch)
            return run.job(run)
    finally:
        os.chdir(before)
        logging.getLogger().handlers[:] = handlers
        logging.captureWarnings(False)
        for descriptor in list(lock._held):  # the run's folder: its process would let go of it
            lock.unlock(descriptor)
        torch.use_deterministic_algorithms(False)


def here(*words: str) -> int:
    """The same for one process, in the present folder."""
    return product(Launch(), Path.cwd(), list(words))


def _raised(error: Exception, *_: Any, **__: Any) -> None:
    raise error
