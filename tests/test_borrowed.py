"""What torch brings, by its dotted name: schedulers and optimizers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Processes
from tests.run import SMALL, Finished, curve, quickly, run

WORDS = [*SMALL, "loop.global_batch=479", "loop.eval_every=null", "optimizer.lr=0.01"]  # an epoch has 3 steps


def borrowed(place: Path, name: str, *words: str, code: int = 0) -> Finished:
    return run([*WORDS, f"run.dir={name}", *words], place=place, code=code)


def scheduler(name: str, *words: str) -> list[str]:
    return ["schedule=torch", f"schedule._target_=torch.optim.lr_scheduler.{name}", *words]


HALVED = scheduler("StepLR", "+schedule.step_size=1", "+schedule.gamma=0.5")
ONCE = scheduler("OneCycleLR", "+schedule.max_lr=0.1", "schedule.per=step", "+schedule.cycle_momentum=false")


@pytest.mark.long
def test_a_scheduler_counts_epochs_or_steps_and_goes_on_where_a_run_does(tmp_path: Path) -> None:
    by_epoch = borrowed(tmp_path, "epoch", *HALVED, "loop.steps=9", "schedule.reference_batch=958")
    assert by_epoch.curve("lr") == pytest.approx([0.005] * 3 + [0.0025] * 3 + [0.00125] * 3)
    by_step = borrowed(tmp_path, "step", *HALVED, "schedule.per=step", "loop.steps=3")
    assert by_step.curve("lr") == [0.01, 0.005, 0.0025]
    whole = borrowed(tmp_path, "whole", *ONCE, "+schedule.total_steps=9", "loop.steps=9")
    for steps in (5, 9):
        parts = borrowed(tmp_path, "parts", *ONCE, "+schedule.total_steps=9", f"loop.steps={steps}")
    assert parts.curve("lr") == whole.curve("lr")
    assert max(whole.curve("lr")) == pytest.approx(0.1, rel=0.1)
    assert "schedule OneCycleLR, once a step" in (whole.folder / "logs" / "rank-0.log").read_text()


# one that keeps numbers beside its moments, one that factors them
FEW = [("NAdam", "fsdp"), ("Adafactor", "zero1")]
PLAIN = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
STRATEGIES = ("ddp", "fsdp", "zero1", "single")
# each optimizer under one strategy, and each strategy with three optimizers; Rprop under fsdp needs torch 2.12
ALL = [(name, STRATEGIES[number % 4]) for number, name in enumerate([*PLAIN, "Muon"])] + FEW


@pytest.mark.parametrize(("name", "strategy"), quickly(dict.fromkeys(ALL), FEW[1]))
def test_an_optimizer_has_one_curve_and_goes_on_to_the_bit(
    tmp_path: Path, processes: Processes, name: str, strategy: str
) -> None:
    words = [*WORDS, "optimizer=torch", f"optimizer._target_=torch.optim.{name}", "schedule=constant"]
    words += ["loop.global_batch=120"]
    words += ["model.freeze=['*.bias']"] if name == "Muon" else []
    size = 1 if strategy == "single" else 2
    alone = run([*words, "run.dir=alone", "loop.steps=4", "strategy=single"], place=tmp_path)
    for folder, steps in (("parts", 2), ("parts", 4), ("whole", 4)):
        own = [*words, f"run.dir={folder}", f"strategy={strategy}", f"loop.steps={steps}"]
        run(own, size, "group", place=tmp_path)
    assert curve(tmp_path / "parts", "loss_hex") == curve(tmp_path / "whole", "loss_hex")
    assert curve(tmp_path / "whole") == pytest.approx(alone.curve(), abs=1e-5)


def test_an_optimizer_that_needs_whole_parameters_is_told_who_keeps_them(tmp_path: Path, processes: Processes) -> None:
    words = [*WORDS, "optimizer=torch", "optimizer._target_=torch.optim.Adafactor", "strategy=fsdp", "run.dir=no"]
    said = run([*words, "loop.global_batch=120"], 2, "group", place=tmp_path, code=2).out.rstrip()
    assert said.startswith("strategy=fsdp: Adafactor cannot step parameters of which ranks hold shards")
    assert said.endswith("under strategy=zero1 and strategy=ddp each is whole where it is stepped")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule=torch"], r"schedule._target_=\?\?\?: a value must be given"),
        (scheduler("StepLR"), "schedule.step_size: StepLR needs it"),
        (scheduler("StepLR", "+schedule.step_size=1", "schedule.per=day"), "schedule.per=day: .* one of step, epoch"),
        ([*ONCE[:-1], "+schedule.total_steps=9"], r"changes the momentum too.*\+schedule.cycle_momentum=false"),
        ([*ONCE, "+schedule.total_steps=3"], "ends after 3 .* this run has 30.*schedule.total_steps=30"),
        (scheduler("ReduceLROnPlateau"), "use schedule=plateau"),
        (["schedule._target_=torch.optim.lr_scheduler.StepLR"], "schedule.final: StepLR takes no such key"),
        (["optimizer=torch", "optimizer._target_=torch.optim.LBFGS"], "LBFGS .* closure"),
        (["optimizer=torch", "optimizer._target_=torch.optim.Muon"], "cannot train .*bias.* only supports 2D"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: Any, said: str) -> None:
    answer = borrowed(tmp_path, "no", *words, code=2).out
    assert re.search(said, answer, re.DOTALL), answer
    assert not (tmp_path / "no").exists()
