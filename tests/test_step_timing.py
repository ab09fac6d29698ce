"""A rank that holds up the others is named, once; it changes nothing of what is learned."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank

from recipes.vision.classification import Classification
from tests.options import options
from tests.ranks import Processes
from tests.run import SMALL, run
from trainer.parallel.ranks import Ranks
from trainer.strategies.step_timing import NoStallClock, StepTimer, StragglerCheck


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


class Arrived:
    def wait(self) -> None: ...


class Company(Ranks):
    """The first of three ranks; what the others tell is added by hand."""

    size = 3
    others = torch.zeros(2, 5, dtype=torch.float64)

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Any]:
        return [tensor, *self.others.double()], Arrived()

    def gather_values(self, value: object) -> list[object]:
        return [("one", 0), ("two", 0), ("two", 1)]


def lines(company: Company, pace: StragglerCheck, *rows: list[float]) -> list[str]:
    """What a line says for which the others tell this: stood still, read, computed, of so many seconds, steps."""
    company.others = torch.tensor(rows, dtype=torch.float64)
    pace.start(StepTimer(NoStallClock()))
    return pace.read()


def test_it_is_told_once_and_again_only_after_the_rank_was_well() -> None:
    company = Company()
    pace = StragglerCheck(company, 0, on_cpu=True)
    fine, slow = [0.0, 0.5, 2.0, 8.0, 10.0], [3.0, 0.5, 2.0, 8.0, 10.0]
    assert lines(company, pace, fine, fine) == []
    (said,) = lines(company, pace, slow, fine)
    assert said == (
        "rank 1 on two holds up the others: it stood still (stopped, swapped out, or without a processor) for 38 % of"
        " the time, they for 0 %"
    )
    assert [len(lines(company, pace, one, fine)) for one in (slow, slow, fine, slow)] == [0, 0, 0, 1]
    # another stage of a pipeline has other work
    assert lines(company, pace, fine, [0.0, 0.5, 7.0, 8.0, 10.0]) == []
    (said,) = lines(company, pace, fine, [0.0, 5.0, 7.0, 8.0, 10.0])
    assert "rank 2 on two holds up the others: it read its data for 62 % of the time" in said
