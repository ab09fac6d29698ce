"""`trainer.run` is a guest in its process: it leaves that as it was, and there is one at a time."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import distributed

import trainer
from tests.run import SMALL, status

WORDS = (*SMALL, "device=cpu", "log=[]", "loop.steps=4", "loop.global_batch=120", "loop.eval_every=2")
CHANGING = ("loop.deterministic=true", "strategy=ddp", "distributed.interface=lo", "profile=[2,3]")
LAB = """
import logging, os, random, threading
import torch
from torch import nn
from recipes.vision.classification import Classification

started, go_on = threading.Event(), threading.Event()


def breaks(**shape) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    os.environ["BROKEN"] = os.environ.pop("KEPT")
    logging.getLogger().setLevel(1)
    raise KeyError("mine")


class Waiting(Classification):
    def after_step(self, network, step):
        if step == 2:
            started.set()
            go_on.wait()
"""


def state() -> dict[str, Any]:
    """What belongs to the whole process, as far as one can ask for it."""
    backends, root = cast(Any, torch.backends), logging.getLogger()
    places = backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn
    os.umask(umask := os.umask(0))
    signal.set_wakeup_fd(pipe := signal.set_wakeup_fd(-1))
    return {
        "random": (random.getstate(), [np.array(each).tolist() for each in np.random.get_state()]),
        "torch": (torch.get_rng_state().tolist(), torch.initial_seed(), torch.get_num_threads()),
        "precision": [place.fp32_precision for place in places],
        "deterministic": (torch.get_deterministic_debug_mode(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "dtype": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "group": distributed.is_initialized(),
        "logging": (root.handlers[:], root.level, logging.root.manager.disable, logging.raiseExceptions),
        "warnings": (warnings.showwarning, warnings.formatwarning, warnings.filters[:]),
        "environment": dict(os.environ),
        "folder": (os.getcwd(), umask, sys.path[:]),
        "signals": ({number: signal.getsignal(number) for number in signal.valid_signals()}, pipe),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "running": (threading.enumerate(), multiprocessing.active_children()),
        "files": opened_files(),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


def opened_files() -> list[str]:
    """What this process has open, by the kernel's word; gloo keeps the pipe of its last group, of whatever number."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}").split("[")[0])
    return sorted(found)


@pytest.fixture
def furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process whose program has chosen for itself, and a lab."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # for processes of a run: once one of them ended by SIGSEGV
    monkeypatch.delitem(sys.modules, "guest", raising=False)
    (tmp_path / "guest.py").write_text(LAB)
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    logging.captureWarnings(True)
    gc.unfreeze()  # what tests/conftest.py has frozen would get less by itself
    yield tmp_path
    gc.freeze()
    logging.captureWarnings(False)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(before)


def same(before: dict[str, Any]) -> None:
    """The process is as it was."""
    gc.collect()
    now = state()
    for name in now:
        assert now[name] == before[name], name


def test_a_run_leaves_the_process_as_it_was(furnished: Path) -> None:
    trainer.run([*WORDS, *CHANGING, "run.name=first"])  # what is imported or begun once may stay
    before = state()
    result = trainer.run([*WORDS, *CHANGING, "run.name=second"])
    same(before)
    assert result.network is not None
    same(before)
    with pytest.raises(KeyError, match="mine"):
        trainer.run([*WORDS, *CHANGING, "model._target_=guest.breaks", "trust=[guest]"])
    same(before)
    with pytest.raises(trainer.Refusal):
        trainer.run([*WORDS, "loop.global_batch=0"])
    same(before)


def test_a_second_run_in_another_thread_is_refused_and_the_first_keeps_what_it_has(furnished: Path) -> None:
    words = [*WORDS, "strategy=ddp", "task._target_=guest.Waiting", "trust=[guest]", "run.name=first"]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(trainer.run, words)
        import guest  # type: ignore[import-not-found]

        assert guest.started.wait(120)
        try:
            for other in (["run.name=second"], ["run.name=first", "job=evaluate"]):
                with pytest.raises(trainer.Refusal, match=r"^trainer\.run is at work in this process already"):
                    trainer.run([*WORDS, *other])
            assert distributed.is_initialized()
        finally:
            guest.go_on.set()
        assert first.result().state == "completed"
    assert status(furnished / "runs" / "first")["state"] == "completed"
    assert not (furnished / "runs" / "second").exists()
    assert trainer.run([*WORDS, "run.name=second"]).state == "completed"
