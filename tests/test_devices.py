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
import torch
from torch import nn

from tests.commands import SMALL, TRANSFORMER, curve, finish, lines
from tests.inside import here
from tests.strategies.networks import Plain
from tests.watch import PHASES, Watch
from trainer.launch.devices import accumulation_dtype
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.process_group import refuse_backend
from trainer.records.checkpoint.manifest import read_manifest
from trainer.records.checkpoint.store import inspect_checkpoint
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.pp import PP
from trainer.strategies.tp import TP

STEPS = ("schedule=constant", "loop.global_batch=120", "loop.micro_batches=2", "loop.max_norm=1", "loop.log_every=1")
OFTEN = ("loop.eval_every=3", "loop.save_every=3", "ema.decay=0.9")
CHANGES = (
    "crop=1",
    "flip=true",
    "resized_crop=0.5",
    "brightness=0.3",
    "trivial=true",
    "erase=0.3",
    "mixup=0.4",
    "cutmix=1",
)
AUGMENTED = [f"data.augment.{change}" for change in CHANGES]
FUSED = "optimizer.fused=true"
RUN = (*SMALL, *STEPS, *OFTEN)


def elsewhere(place: Path, kind: str, runs: list[tuple[str, ...]], size: int = 1) -> list[dict[str, Any]]:
    """How runs end on an accelerator that is not there, and what was found in them."""
    report = place / "report.json"
    finish([sys.executable, "-m", "tests.elsewhere", str(report), str(size), kind, json.dumps(runs)], place)
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    place = tmp_path_factory.mktemp("elsewhere")
    runs = [
        (*RUN, "run.dir=there", "loop.steps=6"),
        (*RUN, "run.dir=there", "loop.steps=9"),
        (*STEPS, *OFTEN, *AUGMENTED, "run.dir=cnn", "loop.steps=3", "model=cnn", "loop.log_every=2", "optimizer=sgd"),
        (*RUN, "device=cuda"),
        (*RUN, "strategy=ddp"),
        (*RUN, "precision=bf16"),
        (*RUN, "run.dir=dp", "loop.steps=2", "strategy=dp", "log=[console]"),
    ]
    return place, elsewhere(place, "wide", runs)


def not_setting_up(findings: Sequence[Any], *also: str) -> list[Any]:
    """What was found in steps, evaluations and reading: to wait before the first step costs once, in a save it must."""
    once = {"first make_trainer", "first begin", "first resume", "first save", "save", *also}
    return [one for one in findings if not once & set(one[2])]


@pytest.mark.long
def test_auto_takes_what_torch_finds_and_the_curve_is_that_of_the_cpu(ran, tmp_path, monkeypatch):
    place, told = ran
    monkeypatch.chdir(tmp_path)
    assert [one["end"] for one in told[:3]] == ["0"] * 3
    assert here(*RUN, "run.dir=here", "loop.steps=9") == 0
    # the same kernels: the same bits, through a save, a resume and evaluations
    assert curve(place / "there", "loss_hex") == curve(tmp_path / "here", "loss_hex")
    for key in ("loss", "accuracy", "ema_accuracy"):
        one, other = ([line[key] for line in lines(where, "eval")] for where in (place / "there", tmp_path / "here"))
        assert one == other
    facts = json.loads((place / "there" / "environment.json").read_text())
    assert (facts["devices"], facts["gpus"]) == ("1 of 1 GPU, Nowhere 1", ["Nowhere 1"])


def test_no_step_and_no_evaluation_waits_or_mixes(ran):
    for told in ran[1][:3]:
        assert not_setting_up(told["findings"]) == []
        assert {start for start, _ in told["copies"]} == {"cpu", "elsewhere"}  # batches; totals on their way back


def test_a_save_copies_every_tensor_to_the_host_once(ran):
    place, told = ran
    saved = [path for path in (place / "there" / "checkpoints").glob("step-*") if path.name <= "step-00000006"]
    (tensors,) = {len(inspect_checkpoint(read_manifest(path)).tensors) for path in saved}
    waits = [one for one in told[0]["findings"] if {"first save", "save"} & set(one[2])]
    assert len(waits) == 2 * len(saved)  # for the losses and the norms: are they finite? for no copy
    fetched = [start for start, during in told[0]["copies"] if {"first save", "save"} & set(during) and start != "cpu"]
    assert len(fetched) == tensors * len(saved)


def test_nothing_is_mixed_anywhere(ran):
    for told in ran[1]:
        assert [one for one in told["findings"] if one[0] == "mixture"] == []


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (3, "device=cuda: torch sees only elsewhere on this machine; use device=elsewhere (or auto)"),
        (4, "nothing that sends tensors of elsewhere from process to process; use strategy=single"),
        (5, "precision=bf16: this GPU has no bfloat16"),
    ],
)
def test_what_a_device_cannot_do_is_refused_in_words(ran, number, said):
    assert said in ran[1][number]["end"]


def test_without_float64_and_fused_steps_there_is_another_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*RUN, "loop.steps=6")
    told = elsewhere(tmp_path, "narrow", [(*words, "run.dir=there"), (*words, "precision=fp64"), (*words, FUSED)])
    assert told[0]["end"] == "0"
    assert "precision=fp64: elsewhere has no float64; use device=cpu" in told[1]["end"]
    assert "optimizer.fused=true: torch says: `fused=True` requires" in told[2]["end"]
    assert "the optimizer's step is not fused here: `fused" in (tmp_path / "there" / "logs" / "rank-0.log").read_text()
    assert here(*words, "run.dir=here") == 0
    assert curve(tmp_path / "there") == pytest.approx(curve(tmp_path / "here"), rel=1e-5)
    evaluations = [[line["accuracy"] for line in lines(tmp_path / where, "eval")] for where in ("there", "here")]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
@pytest.mark.long
def test_several_processes_wait_no_more_than_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*TRANSFORMER, *STEPS, "loop.eval_every=2", "loop.save_every=2", "loop.steps=4")
    spread = ("zero1", "tp", "pp")
    told = elsewhere(tmp_path, "wide", [(*words, f"strategy={one}", f"run.dir={one}") for one in spread], size=2)
    assert here(*words, "run.dir=alone") == 0
    for name, run in zip(spread, told, strict=True):
        assert run["end"] == "0"
        # before anything is learned tensor ranks compare gradients, and torch's schedule takes a vote
        assert not_setting_up(run["findings"], "first train_step") == []
        assert curve(tmp_path / name) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)


def test_the_cpu_adds_up_in_float64():
    assert accumulation_dtype(torch.device("cpu")) == torch.float64


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


@pytest.mark.parametrize("strategy", [TP(tensor=2), TP(context=2), FSDP(tensor=2), PP()])
def test_gloo_is_refused_where_a_gpus_tensors_are_gathered(strategy):
    strategy.machine = Machine(launch=Launch(0, 2), precision="fp32", backend="gloo")
    with patch("trainer.strategies.machine.accelerator_type", lambda: "cuda"), pytest.raises(Refusal) as refusal:
        strategy.check(Plain(), nn.Linear(2, 2), 2)
    assert str(refusal.value).startswith("distributed.backend=gloo cannot ")


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


@pytest.mark.long
@pytest.mark.slow
def test_each_process_may_see_one_device_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, *STEPS, "loop.steps=3")
    told = elsewhere(tmp_path, "wide", [(*words, "strategy=zero1", "run.dir=there")], size=2)
    assert told[0]["end"] == "0"
    assert here(*words, "run.dir=alone") == 0
    assert curve(tmp_path / "there") == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)
    facts = json.loads((tmp_path / "there" / "environment.json").read_text())
    assert facts["devices"] == "2 GPUs, each seen by one process alone, Nowhere 1"


@pytest.mark.gpu
def test_on_a_gpu_no_step_and_no_evaluation_waits_or_mixes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (6, 9):  # the second one goes on
        watch = Watch()
        with watch.over(*PHASES), watch:
            assert here(*RUN, "run.dir=there", f"loop.steps={steps}", "device=cuda", "precision=fp32") == 0
        assert not_setting_up(watch.findings) == []
        assert {start for start, _ in watch.copies} == {"cpu", "cuda"}
    assert here(*RUN, "run.dir=here", "loop.steps=9") == 0
    assert curve(tmp_path / "there") == pytest.approx(curve(tmp_path / "here"), rel=1e-3)
