"""A rank that holds up the others is named, once; it changes nothing of what is learned."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from torch import nn
from torch.distributed import get_rank

from recipes.vision.classification import Classification
from tests.options import options
from tests.ranks import Processes
from tests.run import SMALL, run


class Holding(Classification):
    """Rank 1 stops at each step for a while, as a debugger or a hypervisor would have it."""

    def after_step(self, network: nn.Module, step: int) -> None:
        if get_rank() == 1:
            with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
def test_a_rank_that_stands_still_again_and_again_is_named_and_the_curve_is_the_same(
    processes: Processes, tmp_path: Path
) -> None:
    words = [*options(tmp_path, Holding), *SMALL, "strategy=ddp", "loop.steps=40", "loop.global_batch=16"]
    words += ["loop.eval_every=null", "loop.save_every=null"]
    calm = run([*words, "run.dir=calm"], 2, "group", place=tmp_path)
    held = run([*words, "task=holding", "run.dir=held"], 2, "group", place=tmp_path)
    said = [(done.folder / "logs/rank-0.log").read_text().count("holds up the others") for done in (calm, held)]
    assert said == [0, 1]
    assert "holds up the others: it stood still" in (held.folder / "logs/rank-0.log").read_text()
    assert held.curve("loss_hex") == calm.curve("loss_hex")
