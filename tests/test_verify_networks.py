"""`job=verify` of networks that are right and out of the ordinary; and what a program gets that asks for it."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

import trainer
from tests import test_verify
from tests.commands import TRANSFORMER
from tests.inside import here, product
from tests.planted import precision as in_precision
from tests.planted.plant import GPT, NET
from tests.planted.proofs import verdict, verified
from tests.processes import Processes
from tests.quick import quickly
from tests.test_verify import LISTS
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.context_parallel import ShiftedPlaces

pytestmark = pytest.mark.slow
home = test_verify.home  # the fixture

UNITS = "strategy.activation_checkpointing=units"
RIGHT = {
    "versioned": (["+model.kind=versioned"], ["fsdp"]),
    "complex": (["+model.kind=complex"], ["fsdp"]),
    "orthogonal": (["+model.kind=orthogonal"], ["fsdp"]),
    "versioned, in stages": (["+model.kind=versioned"], ["pp"]),
    "masked": (["+model.kind=masked"], ["fsdp"]),
    "in_place": (["+model.kind=in_place"], ["fsdp"]),
    "in_place, recomputed": (["+model.kind=in_place"], ["ddp", UNITS]),
    "listed": ([*LISTS, "data=listed"], ["fsdp"]),
    "in_dict": ([*LISTS, "data=in_dict"], ["ddp", "loop.micro_batches=2"]),
    "packed": (["+model.kind=packed"], ["fsdp"]),
    "empty": (["+model.kind=empty"], ["fsdp"]),
    "spare": (["+model.kind=spare"], ["zero1"]),
    "spare, in shards": (["+model.kind=spare"], ["fsdp"]),
    "spare, looked for": (["+model.kind=spare"], ["ddp", "strategy.find_unused_parameters=true"]),
    "spare, always": (["+model.kind=spare"], ["ddp", "strategy.static_graph=true"]),
    "instance_norm": (["+model.kind=instance_norm"], ["ddp"]),
    "momentum": (["+model.kind=momentum"], ["ddp"]),
    "momentum, in stages": (["+model.kind=momentum"], ["pp"]),
    "triples": (["model=of_nodes", "data=triples"], ["ddp"]),
}


@pytest.mark.parametrize("name", quickly(RIGHT))
def test_nothing_is_found(processes: Processes, home: Path, name: str) -> None:
    words, (strategy, *own) = RIGHT[name]
    said = verdict(processes, home, 2, [*NET, *words], [f"strategy={strategy}", *own])
    assert said.startswith(f"SAME: {strategy} on 2, "), said


@pytest.mark.long
def test_of_a_module_that_is_called_in_two_stages_nobody_knows_which_call_it_was(
    processes: Processes, home: Path
) -> None:
    schedule = ["strategy=pp", "strategy.schedule=Interleaved1F1B", "loop.micro_batches=2"]
    said = verdict(processes, home, 2, [*TRANSFORMER, "loop.global_batch=8"], schedule)
    assert said.startswith("SAME: pp on 2, "), said


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("narrow", "SAME: ddp on 2, "),
        pytest.param("narrow_rank", "DIFFERS at step 1, forward, middle, samples of", marks=pytest.mark.long),
    ],
)
def test_what_cannot_compute_in_fp64_is_compared_in_fp32(
    processes: Processes, home: Path, kind: str, start: str
) -> None:
    said = verdict(processes, home, 2, [*NET, f"+model.kind={kind}"], ["strategy=ddp"])
    assert said.startswith(start), said
    assert "fp32 gap" in said or kind != "narrow"
    assert "note        it does not compute in fp64 (" in said


def test_complex_numbers_cannot_be_trained_in_fp64(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(Refusal, match=r"^precision=fp64: middle\.weight is complex, .*; use precision=fp32$"):
        here(*NET, "+model.kind=complex", "precision=fp64", "run.dir=wide")
    assert not (home / "wide").exists()


def test_from_python_a_difference_is_raised_and_a_run_in_the_folder_stays_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    words = [*NET, "device=cpu", "log=[]", "run.dir=asked", "loop.micro_batches=3"]
    assert trainer.run([*words, "loop.epochs=null", "loop.steps=1"]).metrics
    for kind, wanted in (("versioned", ""), ("centred", "DIFFERS at step 1, forward, middle")):
        asked = [*words, "job=verify", f"+model.kind={kind}"]
        trainer.run([*asked, "job.record=python.safetensors"])
        with pytest.raises(RuntimeError, match=f"^{wanted}") if wanted else nullcontext():
            assert trainer.run([*asked, "job.reference=python.safetensors"]).metrics == {}
    others = [
        "optimizer.lr=0.5",
        "job.steps=2",
        "job.batch=6",
        "strategy=ddp",
        "precision=bf16",
        "loop.micro_batches=1",
    ]
    said = r"made with other words \(optimizer\.lr: 0\.001 → 0\.5, job\.steps: 3 → 2, job\.batch: 24 → 6\): give"
    with pytest.raises(Refusal, match=said):
        trainer.run([*asked, "job.reference=python.safetensors", *others])
    assert {path.name for path in (home / "asked").iterdir()} > {"verify", "checkpoints", "metrics.jsonl"}


@pytest.mark.parametrize("wrong", ["text", "weights"])
def test_a_file_that_is_no_reference_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.chdir(home)
    file = home / f"{wrong}.safetensors"
    save_file({"weight": torch.zeros(2)}, file) if wrong == "weights" else file.write_text("a note")
    with pytest.raises(Refusal, match=r"is no reference, or an older version has written it; job\.record="):
        trainer.run([*NET, "device=cpu", "log=[]", "run.dir=refused", "job=verify", f"job.reference={file}"])


def test_an_order_that_ignores_its_generator_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(Refusal, match=r"GlobalOrder\.order\(0\) is another one when it is asked for again"):
        trainer.run([*NET, "data=global_order", "device=cpu", "log=[]", "run.dir=refused", "job=verify"])


def plant(launch: Launch, place: Path, words: list[str], mistake: str) -> tuple[Any, str]:
    """The same with a mistake of the program that fp64 does not show."""
    _, _, target, change, _ = in_precision.PLANTED[mistake]
    with patch(target, change):
        return verified(launch, place, words)


@pytest.mark.parametrize("optimizer", quickly(["sgd", "adamw"], "adamw"))
@pytest.mark.parametrize("mistake", quickly(in_precision.PLANTED, "own_scale"))
def test_what_only_the_precision_of_the_run_shows_is_found_there(
    processes: Processes, home: Path, mistake: str, optimizer: str
) -> None:
    precision, strategy, _, _, where = in_precision.PLANTED[mistake]
    words = [*NET, f"precision={precision}", f"optimizer={optimizer}"]
    said = verdict(processes, home, 2, words, [f"strategy={strategy}"], partial(plant, mistake=mistake))
    assert said.startswith(f"DIFFERS in its precision alone: {strategy} on 2, fp64 gap "), said
    assert f"; first at {where}" in said, said


@pytest.mark.long
def test_a_key_that_makes_gradients_narrow_is_tried_and_named(processes: Processes, home: Path) -> None:
    said = verdict(processes, home, 2, [*NET, "precision=fp32"], ["strategy=ddp", "strategy.compress=bf16"])
    assert said.startswith("DIFFERS in its precision alone: ddp on 2, fp64 gap "), said
    assert "cause: strategy.compress=bf16, which is narrower than precision=fp32; without it the strategy" in said


def breaking(launch: Launch, place: Path, words: list[str]) -> tuple[Any, str]:
    """What is said where an experiment fails; the strategy has a mistake, for which the experiments are made."""

    def fails(*given: Any, **more: Any) -> bool:
        raise ValueError("a planted error")

    def one(x: Any, factor: Any) -> Any:
        return x

    with (
        patch("trainer.strategies.parallel_model.scale_loss", one),
        patch("trainer.verify.cause_experiments.train_and_record", fails),
        redirect_stdout(io.StringIO()) as said,
        pytest.raises(ValueError, match="planted"),
    ):
        product(launch, place, ["job=verify", *words])
    return 1, said.getvalue()


@pytest.mark.long
def test_an_experiment_that_fails_does_not_keep_the_verdict_to_itself(processes: Processes, home: Path) -> None:
    said = verdict(processes, home, 2, [*NET], ["strategy=ddp", "loop.micro_batches=2"], breaking)
    assert said.startswith("DIFFERS at step 1, gradient, head.bias, "), said
    assert "cause: not known: an experiment failed, ValueError" in said


def unshifted(launch: Launch, place: Path, words: list[str]) -> tuple[Any, str]:
    """The same where the second context rank takes its own first token for the sequence's first."""

    def call(self: Any, forward: Any, mesh: Any, rank: int, *args: Any, **more: Any) -> Any:
        return forward(*args, **more) if rank else shifted(self, forward, mesh, rank, *args, **more)

    shifted = ShiftedPlaces._call
    with patch.object(ShiftedPlaces, "_call", call):
        return verified(launch, place, words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "start"), [(verified, "SAME: cp on 2, "), (unshifted, "DIFFERS at step 1, forward, position,")]
)
def test_what_context_ranks_compute_is_put_together(processes: Processes, home: Path, how: Any, start: str) -> None:
    words = [*GPT, "model.depth=1"]
    said = verdict(processes, home, 2, words, ["strategy=cp"], how)
    assert said.startswith(start), said
    assert "compared    18 of 18 modules" in said
