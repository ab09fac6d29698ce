"""`job=verify` of networks that are right and out of the ordinary; and what a program gets that asks for it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

import trainer
from tests import test_verify
from tests.processes import Processes
from tests.quick import quickly
from tests.test_verify import NET, verdict

pytestmark = pytest.mark.slow
home = test_verify.home  # the fixture

RIGHT = [("versioned", ["fsdp"]), ("versioned", ["pp"])]
RIGHT += [("masked", ["fsdp"])]
RIGHT += [("in_place", ["fsdp"]), ("in_place", ["ddp", "strategy.activation_checkpointing=units"])]


@pytest.mark.parametrize(("kind", "strategy"), quickly(RIGHT, RIGHT[0], RIGHT[2]))
def test_nothing_is_found(processes: Processes, home: Path, kind: str, strategy: list[str]) -> None:
    words = [*NET, f"+model.kind={kind}"]
    said = verdict(processes, home, 2, words, [f"strategy={strategy[0]}", *strategy[1:]])
    assert said.startswith(f"SAME: {strategy[0]} on 2, "), said


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
