"""Run folders that an older commit wrote: they are evaluated, used and resumed with the figures that it had itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.baseline.old_runs import HERE, figures, job_words, learned, read_lines, sums, unpack, words
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from trainer.launch.rendezvous import Launch

pytestmark = pytest.mark.slow

EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
NEAR: dict[str, Any] = {"rel": 1e-5, "abs": 1e-7}  # the last bits are other ones on another processor
CONFIG = "config.yaml"


def run(place: Path, *told: str) -> None:
    """A command on one process."""
    assert product(Launch(), place, list(told)) == 0


def without_processes(command: list[str]) -> tuple[int, list[str]]:
    """How many processes a command asks for, and its other words."""
    asked = [word for word in command if word.startswith("processes=")]
    return int(asked[0].partition("=")[2]) if asked else 1, [word for word in command if word not in asked]


@pytest.mark.parametrize("name", quickly(EXPECTED, "single", "pp", "lora"))
def test_an_old_run_goes_on_to_its_end_as_it_would_have_then(processes: Processes, tmp_path: Path, name: str) -> None:
    folder, expected = unpack(name, tmp_path), EXPECTED[name]
    before = (folder / CONFIG).read_bytes()
    run(tmp_path, *job_words("evaluate", name, ""))
    evaluated = figures(read_lines(folder / "evaluate" / "metrics.jsonl")[-1])
    assert evaluated == pytest.approx(expected["evaluate"], **NEAR)
    assert (folder / CONFIG).read_bytes() == before
    size, command = without_processes(words(name, name))
    assert processes.run(size, product, tmp_path, command) == [0] * size
    now = learned(folder)
    # random numbers of a forward follow from other places of the network now: such a run goes on with other masks
    near = {"rel": 0.1} if name == "sample_dropout" else NEAR
    assert [line[0] for line in now["train"]] == [line[0] for line in expected["train"]]
    for figure in range(1, 4):  # loss, norm of the gradient, rate
        ours, theirs = ([line[figure] for line in lines] for lines in (now["train"], expected["train"]))
        assert ours == pytest.approx(theirs, **near)
    assert len(now["eval"]) == len(expected["eval"])
    for ours, theirs in zip(now["eval"], expected["eval"], strict=True):
        assert ours == pytest.approx(theirs, **near)


@pytest.mark.parametrize("name", quickly(("ema", "fsdp", "lora"), "ema"))
def test_an_old_run_predicts_and_is_exported(tmp_path: Path, name: str) -> None:
    unpack(name, tmp_path)
    for job in ("predict", "export"):
        out = tmp_path / f"{job}ed.safetensors"
        run(tmp_path, *job_words(job, name, out))
        ours, theirs = sums(out), EXPECTED[name][job]
        assert ours.keys() == theirs.keys()
        for tensor, wanted in theirs.items():
            assert ours[tensor] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
