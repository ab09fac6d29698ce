"""Run folders that an older commit wrote: they are evaluated, used and resumed with the figures that it had itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.baseline.old_runs import HERE, figures, job_words, learned, read_lines, sums, unpack, words
from tests.run import quickly, run

EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
NEAR: dict[str, Any] = {"rel": 1e-5, "abs": 1e-7}  # the last bits are other ones on another processor
CONFIG = "config.yaml"


@pytest.mark.parametrize("name", quickly(EXPECTED, "single", "pp"))
def test_an_old_run_goes_on_to_its_end_as_it_would_have_then(processes: object, tmp_path: Path, name: str) -> None:
    folder, expected = unpack(name, tmp_path), EXPECTED[name]
    before = (folder / CONFIG).read_bytes()
    run(job_words("evaluate", name, ""), place=tmp_path)
    evaluated = figures(read_lines(folder / "evaluate" / "metrics.jsonl")[-1])
    assert evaluated == pytest.approx(expected["evaluate"], **NEAR)
    assert (folder / CONFIG).read_bytes() == before
    command = words(name, name)
    several = "processes=2" in command
    command = [word for word in command if word != "processes=2"]
    run(command, 2 if several else 1, "group" if several else "here", place=tmp_path)
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
        run(job_words(job, name, out), place=tmp_path)
        ours, theirs = sums(out), EXPECTED[name][job]
        assert ours.keys() == theirs.keys()
        for tensor, wanted in theirs.items():
            assert ours[tensor] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
