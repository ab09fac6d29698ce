"""`job=verify` of networks that are right and out of the ordinary; and what a program gets that asks for it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

import trainer
from tests import test_verify
from tests.planted.plant import NET
from tests.planted.proofs import verdict
from tests.processes import Processes
from tests.quick import quickly
from tests.test_verify import LISTS

pytestmark = pytest.mark.slow
home = test_verify.home  # the fixture

UNITS = "strategy.activation_checkpointing=units"
RIGHT = {
    "versioned": (["+model.kind=versioned"], ["fsdp"]),
    "versioned, in stages": (["+model.kind=versioned"], ["pp"]),
    "masked": (["+model.kind=masked"], ["fsdp"]),
    "in_place": (["+model.kind=in_place"], ["fsdp"]),
    "in_place, recomputed": (["+model.kind=in_place"], ["ddp", UNITS]),
    "listed": ([*LISTS, "data=listed"], ["fsdp"]),
    "in_dict": ([*LISTS, "data=in_dict"], ["ddp", "loop.micro_batches=2"]),
    "triples": (["model=of_nodes", "data=triples"], ["ddp"]),
}


@pytest.mark.parametrize("name", quickly(RIGHT, "versioned", "masked", "listed", "triples"))
def test_nothing_is_found(processes: Processes, home: Path, name: str) -> None:
    words, (strategy, *own) = RIGHT[name]
    said = verdict(processes, home, 2, [*NET, *words], [f"strategy={strategy}", *own])
    assert said.startswith(f"SAME: {strategy} on 2, "), said


@pytest.mark.parametrize(
    ("kind", "start"),
    [("narrow", "SAME: ddp on 2, "), ("narrow_rank", "DIFFERS at step 1, forward, middle, samples of")],
)
def test_what_cannot_compute_in_fp64_is_compared_in_fp32(
    processes: Processes, home: Path, kind: str, start: str
) -> None:
    said = verdict(processes, home, 2, [*NET, f"+model.kind={kind}"], ["strategy=ddp"])
    assert said.startswith(start), said
    assert "fp32 gap" in said or kind != "narrow"
    assert "note        it does not compute in fp64 (" in said


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
    assert {path.name for path in (home / "asked").iterdir()} > {"verify", "checkpoints", "metrics.jsonl"}
