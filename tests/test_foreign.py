"""docs/foreign.md: code that was not written for this program does what the page says, by the page's own commands.

Every cell is one `python -m trainer` as a user types it. `single` ends with a loss. `ddp`, `fsdp` and `pp` on two
processes are compared with it, step by step; `pp` with one process of two micro-batches. `verify` is the first line
of `job=verify strategy=fsdp`. What differs in fp32 is compared in fp64, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.inside import product
from trainer.launch.rendezvous import Launch

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "foreign.md"
SAME = 1e-5  # relative: in eight steps fp32 rounds by 2.5e-6 at most; masks that differ make 9e-5
SAME_EXACTLY = 1e-9  # the same in fp64
BRIEF = ["log=[console]", "precision=fp32", "loop.steps=8", "loop.log_every=1", "loader.workers=0"]
COLUMNS: dict[str, list[str]] = {
    "single": [],
    "ddp": ["processes=2", "strategy=ddp", "strategy.sync_bn=true"],
    "fsdp": ["processes=2", "strategy=fsdp", "strategy.sync_bn=true"],
    "pp": ["processes=2", "strategy=pp", "loop.micro_batches=2"],
    "verify": ["processes=2", "job=verify", "strategy=fsdp", "strategy.sync_bn=true"],
}


def read_page() -> dict[tuple[str, str], str]:
    """What the page says of each case under each strategy, refusals whole."""
    text = PAGE.read_text()
    notes = dict(re.findall(r"^\[(\d+)\] (.+)$", text.partition("\n## ")[0], re.MULTILINE))
    cells = {}
    for line in text.splitlines():
        if named := re.match(r"\| `(\w+)`: ", line):
            for column, shown in zip(COLUMNS, line.strip("| ").split(" | ")[1:], strict=True):
                number = re.search(r"\[(\d+)\]$", shown)
                cells[named[1], column] = notes[number[1]] if number else shown
    return cells


CELLS = read_page()


def run(case: str, column: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One command to its end, in tests/."""
    command = [sys.executable, "-m", "trainer", "--config-dir", "foreign/conf", f"experiment={case}"]
    command += [*COLUMNS[column], *BRIEF, *words, f"run.dir={folder}"]
    return subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, stdin=subprocess.DEVNULL)


def curve(case: str, column: str, folder: Path, *words: str) -> list[float]:
    """The losses of a run, or of one that is there."""
    if not folder.exists():
        run(case, column, folder, *words).check_returncode()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def cell(case: str, column: str, place: Path) -> str:
    """How a command ended, as the page says it, without the numbers that depend on the processor."""
    ended = run(case, column, place / "run")
    if verdict := re.search(r"^(SAME|DIFFERS)", ended.stdout, re.MULTILINE):
        return verdict[0]
    if ended.returncode == 2:
        return f"refused: {' '.join(ended.stderr.split())}"
    ended.check_returncode()
    if column == "single":
        return "loss"
    # in one process as many micro-batches: of BatchNorm and `gather` these are a part
    words = [word for word in COLUMNS[column] if word.startswith("loop.")]
    if apart(curve(case, column, place / "run"), curve(case, "single", place / "single", *words)) < SAME:
        return "same"
    # rounding that falls on the other side of a ReLU's corner changes far more than it rounds
    words.append("precision=fp64")
    exact = curve(case, column, place / "exact", "precision=fp64"), curve(case, "single", place / "alone", *words)
    return "same in fp64" if apart(*exact) < SAME_EXACTLY else "differs"


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def test_the_page_has_every_case_and_no_mistake() -> None:
    programs = {path.stem for path in (ROOT / "tests/foreign/conf/experiment").iterdir()}
    assert CELLS.keys() == {(case, column) for case in programs for column in COLUMNS}
    assert not {place for place, text in CELLS.items() if text.startswith(("**", "DIFFERS"))}


@pytest.mark.parametrize(
    ("case", "column"),
    [
        pytest.param(
            *place, marks=[] if place == ("vae", "fsdp") else pytest.mark.long(one_in=30)
        )  # half a minute each
        for place in CELLS
    ],
)
def test_a_cell_of_the_page_is_true(case: str, column: str, tmp_path: Path) -> None:
    packages = dict.fromkeys(("bert", "t5", "mae"), "transformers") | {"lightning_module": "lightning"}
    if case in packages:
        pytest.importorskip(packages[case])
    said = CELLS[case, column]
    known = re.match(r"loss|same in fp64|same|SAME", said)
    assert cell(case, column, tmp_path) == (known[0] if known else said)


def test_in_fp64_a_forward_makes_tensors_of_fp64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    words = ["experiment=ddpm", "precision=fp64", "loop.steps=2", "strategy.activation_checkpointing=units"]
    assert product(Launch(), ROOT / "tests", ["--config-dir", "foreign/conf", *words, f"run.dir={tmp_path}"]) == 0
