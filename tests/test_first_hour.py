"""scripts/gpu_first_hour: its every line runs on a CPU; what is wrong is named; what takes too long is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts.first_hour import cases
from scripts.first_hour.runs import LATE, Ended, Runs
from scripts.first_hour.sections import SECTIONS, Hour, strategies
from tests.warm import ROOT


def start(place: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    """Exit code and screen of the script, which has nothing but torch's Python and this checkout."""
    command = [str(ROOT / "scripts/gpu_first_hour"), *words]
    surroundings = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=place, env=surroundings, capture_output=True, text=True, timeout=1800)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    code, screen, errors = start(tmp_path)
    assert (code, screen, errors.count("\n")) == (2, "", 1)
    assert "there is no GPU here; --device cpu" in errors
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_without_a_package_that_every_run_needs_it_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['safetensors'] = None\n")
    code, screen, errors = start(tmp_path, "--device", "cpu", PYTHONPATH=str(tmp_path))
    assert (code, screen) == (2, "")
    assert errors.endswith("not installed, and every run needs it: safetensors\n")


@pytest.mark.slow
@pytest.mark.long
def test_every_line_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    code, screen, errors = start(tmp_path, "--quick", "--device", "cpu")
    assert code == 0, screen + errors
    assert not (tmp_path / "runs/gpu_first_hour.md.log").read_text()
    assert (tmp_path / "runs/gpu_first_hour.md").read_text() == screen
    assert [line[3:] for line in screen.splitlines() if line.startswith("## ")] == [*SECTIONS, "all"]
    assert "| ddp on 2, gloo | fp32 | 6 |" in screen
    assert screen.count("SAME: ") == 2
    assert screen.count("| 6 | yes |") == 3
    assert screen.endswith("- 0 wrong\n")


class Said(Runs):
    """Runs that say what a test wants, and do nothing."""

    def __init__(self, place: Path, codes: dict[str, int], losses: dict[str, list[float]]) -> None:
        super().__init__(place, "cpu", place / "log")
        self._codes, self._losses = codes, losses

    def trainer(self, name: str, words: str, **variables: str) -> Ended:
        return Ended(self._codes.get(name, 0), "SAME: as ever", "a sentence")

    def losses(self, name: str) -> dict[int, float]:
        return dict(enumerate(self._losses.get(name, [2.0, 1.0])))


def name(strategy: str, processes: int = 1) -> str:
    return next(each for each in cases.cases(1) if (each.strategy, each.processes) == (strategy, processes)).name


def test_what_is_far_away_fails_or_may_not_be_refused_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    codes = {
        f"curve-{name('tp', 2)}-fp32": 2,  # may be refused
        f"curve-{name('zero1')}-bf16": 2,
        f"curve-{name('zero1')}-fp32": 2,  # may not
        f"curve-{name('hsdp', 4)}-fp16": 1,
        f"verify-{name('ddp')}": 1,
    }
    losses = {
        f"curve-{name('ddp')}-bf16": [2.0, 1.009],  # inside of its tolerance
        f"curve-{name('ddp')}-fp32": [2.0, 1.009],
        f"curve-{name('fsdp')}-fp32": [2.0],  # a step is missing
        f"curve-{name('dp')}-fp16": [float("nan"), 1.0],
    }
    lines: list[str] = []
    wrong: list[str] = []
    strategies(Hour(Said(tmp_path, codes, losses), lines.append, wrong.append, 1, 2, jobs=2, quick=False))
    assert sorted(each.partition(":")[0] for each in wrong) == [
        "ddp on 1, fp32",
        "dp on 1, fp16",
        "fsdp on 1, fp32",
        "hsdp strategy.replicate=2 on 4, gloo, fp16",
        "job=verify of ddp on 1 ended with 1",
        "zero1 on 1, fp32",
    ]
    assert len(lines) == 2 + 4 * len(cases.cases(1))  # the table's head, three precisions and a proof
    assert sum("refused: a sentence" in line for line in lines) == 3


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_every_case_has_a_run_folder_of_its_own(gpus: int) -> None:
    names = [case.name for case in cases.cases(gpus)]
    assert len({*names}) == len(names)
    assert {*cases.MUST} <= {case.strategy for case in cases.cases(gpus)}


def test_a_command_that_takes_too_long_is_ended_and_the_next_does_not_start(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "cpu", tmp_path / "log")
    runs.deadline = time.monotonic() + 1
    code = "import signal; print('said', flush=True); signal.pause()"
    late = runs.command("late", ["-c", code])
    assert (late.code, late.why) == (LATE, "out of time; said")
    assert runs.command("next", ["-c", ""]) == Ended(LATE, "", "it was not started")
    assert "late ended with 124" in (tmp_path / "log").read_text()
