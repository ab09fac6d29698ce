"""Devices: which one a run takes, what is said of one that lacks something, and that nothing in a step waits for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.elsewhere import Watch
from tests.run import SMALL, TRANSFORMER, Command, curve, lines, run
from trainer import Refusal
from trainer.launch.rendezvous import Launch
from trainer.parallel.process_group import refuse_backend
from trainer.strategies.machine import Machine

STEPS = ("schedule=constant", "loop.global_batch=120", "loop.micro_batches=2", "loop.max_norm=1", "loop.log_every=1")
SELDOM = ("loop.save_every=null", "ema.decay=0.9")  # one save, at the end
CHANGES = "crop=1 flip=true resized_crop=0.5 brightness=0.3 trivial=true erase=0.3 mixup=0.4 cutmix=1"
AUGMENTED = [f"data.augment.{change}" for change in CHANGES.split()]
RUN = (*SMALL, *STEPS, *SELDOM, "loop.eval_every=2")


def elsewhere(place: Path, runs: Sequence[Sequence[str]], size: int = 1) -> list[dict[str, Any]]:
    """How runs end on an accelerator that is not there, and what was found in them."""
    report = place / "report.json"
    command = [sys.executable, "-m", "tests.elsewhere", str(report), str(size), json.dumps(runs)]
    ended = Command(command, place).end()
    assert (ended.code, ended.left) == (0, []), ended.out
    return json.loads(report.read_text())


def not_setting_up(findings: Sequence[Any], last: int, saved: Sequence[int] = ()) -> list[Any]:
    """What was found in steps, evaluations and reading: not before the first step, which costs once, nor at the end.

    saved: after which steps a save may wait twice, for the losses and the norms: are they finite?
    """
    found = [one for one in findings if 1 <= one[2] < last]
    twice = [one for one in found if one[2] in saved and one[0] == "waiting copy"]
    assert all(sum(one[2] == step for one in twice) <= 2 for step in saved), twice
    return [one for one in found if one not in twice]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    place = tmp_path_factory.mktemp("elsewhere")
    runs = [
        (*RUN, "run.dir=there", "loop.steps=5"),
        (*RUN, "run.dir=there", "loop.steps=9"),
        (*STEPS, *SELDOM, *AUGMENTED, "run.dir=cnn", "loop.steps=3", "model=cnn", "loop.log_every=2", "optimizer=sgd"),
        (*RUN, "device=cuda"),
        (*RUN, "strategy=ddp"),
        (*RUN, "precision=bf16"),
    ]
    return place, elsewhere(place, runs)


@pytest.mark.long
def test_auto_takes_what_torch_finds_and_the_curve_is_that_of_the_cpu(
    ran: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    place, told = ran
    assert [one["code"] for one in told] == [0, 0, 0, 2, 2, 2], told
    here = run([*RUN, "run.dir=here", "loop.steps=9"], place=tmp_path)
    # the same kernels: the same bits, through a save, a resume and evaluations
    assert curve(place / "there", "loss_hex") == here.curve("loss_hex")
    evaluated = [
        {key: line[key] for key in ("step", "loss", "accuracy", "ema_accuracy")} for line in here.lines("eval")
    ]
    there = {line["step"]: line for line in lines(place / "there", "eval")}
    assert all(there[line["step"]].items() >= line.items() for line in evaluated)
    facts = json.loads((place / "there" / "environment.json").read_text())
    assert (facts["devices"], facts["gpus"]) == ("1 of 1 GPU, Nowhere 1", ["Nowhere 1"])


def test_no_step_and_no_evaluation_waits_and_nothing_is_mixed_anywhere(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    for told, last, evaluated in zip(ran[1], (5, 4, 3), ((2, 4), (1, 3), ()), strict=False):
        assert not_setting_up(told["findings"], last, evaluated) == []  # the best evaluation so far is saved
        assert {start for start, _ in told["copies"]} == {"cpu", "elsewhere"}  # batches; totals on their way back
    assert [one for told in ran[1] for one in told["findings"] if one[0] == "mixture"] == []


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (3, "device=cuda: torch sees only elsewhere on this machine; use device=elsewhere (or auto)"),
        (4, "nothing that sends tensors of elsewhere from process to process; use strategy=single"),
        (5, "precision=bf16: this GPU has no bfloat16"),
    ],
)
def test_what_a_device_cannot_do_is_refused_in_words(
    ran: tuple[Path, list[dict[str, Any]]], number: int, said: str
) -> None:
    assert said in ran[1][number]["said"]


@pytest.mark.long
def test_several_processes_wait_no_more_than_one_and_offloading_does_not(tmp_path: Path) -> None:
    words = (*TRANSFORMER, *STEPS, "loop.eval_every=2", "loop.save_every=null", "loop.steps=4")
    spread = ("zero1", "tp", "pp")
    told = elsewhere(tmp_path, [(*words, f"strategy={one}", f"run.dir={one}") for one in spread], size=2)
    told += elsewhere(tmp_path, [(*words, "strategy.activation_offload=true", "run.dir=offload")])
    alone = run([*words, "run.dir=alone"], place=tmp_path)
    for name, one in zip((*spread, "offload"), told, strict=True):
        assert one["code"] == 0, one
        # before anything is learned tensor ranks compare gradients, and torch's schedule takes a vote
        assert not_setting_up(one["findings"], 4, [2]) == []
        assert curve(tmp_path / name) == pytest.approx(alone.curve(), rel=1e-5)
    assert curve(tmp_path / "offload", "loss_hex") == alone.curve("loss_hex")
    sent = [start for start, step in told[-1]["copies"] if start == "elsewhere" and step in (1, 2)]
    assert len(sent) > 2 * 2 * 4  # of two steps and two micro-batches what the first of two blocks keeps
    facts = json.loads((tmp_path / "zero1" / "environment.json").read_text())
    assert facts["devices"] == "2 GPUs, each seen by one process alone, Nowhere 1"


@pytest.mark.parametrize(
    ("kind", "wanted", "said"),
    [
        ("mps", None, "nothing that sends tensors of mps"),
        ("mps", "gloo", "nothing that sends tensors of mps"),
        ("xpu", "gloo", "backend=gloo sends tensors of cpu and cuda, and this run computes on xpu; use xccl"),
        ("cpu", "nccl", "backend=nccl sends tensors of cuda, and this run computes on cpu; use gloo"),
    ],
)
def test_a_backend_that_cannot_send_from_the_device_is_refused(kind, wanted, said):
    with pytest.raises(Refusal, match=said):
        refuse_backend(kind, wanted)
    for fitting in (("cpu", None), ("cpu", "gloo"), ("cuda", "gloo"), ("cuda", "nccl"), ("xpu", None)):
        refuse_backend(*fitting)


def refused(launch: Launch, seen: list[list[str]]) -> str:
    """What a rank is told if each sees these GPUs; each is refused, or none."""
    properties = [SimpleNamespace(uuid=uuid) for uuid in seen[launch.rank]]
    with (
        patch("trainer.strategies.machine.accelerator_type", lambda: "xpu"),
        patch("torch.accelerator.device_count", lambda: len(properties)),
        patch("torch.xpu.get_device_properties", lambda device: properties[device.index]),
    ):
        try:
            Machine(launch=launch, precision="fp32").refuse_shared_devices()
        except Refusal as refusal:
            return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([["a", "b", "c"]] * 3, ""),
        ([["a"], ["b"], ["c"]], ""),  # --gpus-per-task=1: each is number 0
        ([["a", "b"], ["c", "d"], ["e", "f"]], ""),
        ([["a", "b"]] * 3, "3 processes on this machine, but 2 GPUs, and rank "),
        ([["a"], ["b"], ["b"]], "3 processes on this machine, but 1 GPU, and rank "),
    ],
)
def test_processes_that_would_share_a_device_are_refused(processes, seen, said):
    told = processes.run(3, refused, seen)
    assert len(set(told)) == 1
    assert told[0].startswith(said)
    assert bool(told[0]) == bool(said)


@pytest.mark.gpu
def test_on_a_gpu_no_step_and_no_evaluation_waits_or_mixes(tmp_path: Path) -> None:
    for steps, last, evaluated in ((5, 5, (2, 4)), (9, 4, (1, 3))):  # the second one goes on
        with Watch() as watch:
            run([*RUN, "run.dir=there", f"loop.steps={steps}", "device=cuda", "precision=fp32"], place=tmp_path)
        assert not_setting_up(watch.findings, last, evaluated) == []
        assert {start for start, _ in watch.copies} == {"cpu", "cuda"}
    here = run([*RUN, "run.dir=here", "loop.steps=9"], place=tmp_path)
    assert curve(tmp_path / "there") == pytest.approx(here.curve(), rel=1e-3)
