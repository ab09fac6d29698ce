"""docs/foreign.md: code that was not written for this program does what the page says, by the page's own commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.foreign import BEGIN, CASES, COLUMNS, END, PAGE, ROOT, cell
from tests.inside import product
from trainer.launch.rendezvous import Launch

pytestmark = pytest.mark.slow


def table() -> dict[tuple[str, str], str]:
    """What the page says of each case under each strategy, refusals whole."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    notes = dict(re.findall(r"^\[(\d+)\] (.+)$", text, re.MULTILINE))
    cells = {}
    for line in text.splitlines():
        if named := re.match(r"\| `(\w+)`: ", line):
            for column, shown in zip(COLUMNS, line.strip("| ").split(" | ")[1:], strict=True):
                number = re.search(r"\[(\d+)\]$", shown)
                cells[named[1], column] = notes[number[1]] if number else shown
    return cells


def outcome(text: str) -> str:
    """Without the numbers that depend on the processor."""
    return re.match(r"loss|same in fp64|same|SAME|DIFFERS|\*\*differs|(?s:.*)", text)[0]


def test_the_page_has_every_case_and_no_mistake() -> None:
    cells = table()
    assert set(cells) == {(case, column) for case in CASES for column in COLUMNS}
    assert not {place for place, text in cells.items() if text.startswith(("**", "DIFFERS"))}


@pytest.mark.long(one_in=30)  # they take half a minute each
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("case", CASES)
def test_a_cell_of_the_page_is_true(case: str, column: str) -> None:
    packages = dict.fromkeys(("bert", "t5", "mae"), "transformers") | {"lightning_module": "lightning"}
    if case in packages:
        pytest.importorskip(packages[case])
    assert outcome(cell(case, column)) == outcome(table()[case, column])


def test_in_fp64_a_forward_makes_tensors_of_fp64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    words = ["experiment=ddpm", "precision=fp64", "loop.steps=2", "strategy.activation_checkpointing=units"]
    assert product(Launch(), ROOT / "tests", ["--config-dir", "foreign/conf", *words, f"run.dir={tmp_path}"]) == 0
