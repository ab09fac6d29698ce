"""A process group: which interface it uses, and how long a collective may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recipes.vision.classification import Classification
from tests.run import SMALL, run
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine

CPU = torch.device("cpu")


class Noting(Classification):
    """Writes down how long a collective may take: in the steps, and in evaluations."""

    def note(self, where: str) -> None:
        backend = dist.group.WORLD._get_backend(CPU)
        with Path("times").open("a") as file:
            print(where, round(backend.options._timeout.total_seconds()), file=file)

    def loss(self, output: Tensor, target: Tensor) -> Any:
        if output.requires_grad:
            self.note("training")
        return super().loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.note("evaluation")
        return super().metrics(output, target)


def test_the_first_step_and_an_evaluation_have_the_long_time_and_other_steps_the_short_one(tmp_path: Path) -> None:
    words = [*SMALL, "strategy=ddp", "loop.steps=5", "loop.eval_every=3", "trust=[tests]"]
    words += ["task._target_=tests.test_world.Noting", "distributed.timeout=7min", "distributed.step_timeout=40s"]
    run(words, place=tmp_path)
    lines = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    # torch is later than the watchdog, which can say who hangs
    times = {where: [int(seconds) for each, seconds in lines if each == where] for where, _ in lines}
    (long,), short = {*times["evaluation"]}, times["training"][-1]
    # that of the step after an evaluation ends with it
    assert times["training"][-5:] == [long, short, short, long, short]
    assert long - short == 420 - 40
    assert long > 420


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    refused = run([*SMALL, "distributed.interface=eth77"], place=tmp_path, code=2)
    assert refused.out.startswith("distributed.interface=eth77: ")
    assert " has no such network interface; it has lo" in refused.out


def test_the_interface_is_left_where_gloo_and_nccl_look(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "as it was")
    Machine(device="cpu").claim_device()
    assert [os.environ[name] for name in names] == ["as it was"] * 2
    with DDP(machine=Machine(device="cpu", interface="lo")) as strategy:
        assert [os.environ[name] for name in names] == ["lo", "=lo"]
        strategy.world.barrier()


def test_after_an_error_a_group_of_one_leaves_room_for_the_next() -> None:
    for _ in range(2):  # a notebook's cell that is run again
        with pytest.raises(KeyError), DDP(machine=Machine(device="cpu")):
            raise KeyError
    assert not dist.is_initialized()
