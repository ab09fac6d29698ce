"""docs/problems.md: what it says that a command answers is what the command answers."""

import re
from pathlib import Path

import pytest

from tests.run import ROOT, run

PAGE = (ROOT / "docs" / "problems.md").read_text()
ANSWERS = re.findall(r"^\$ python -m trainer (.+)\n((?:(?!```).+\n)+)```", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("words", "answer"), ANSWERS)
def test_a_command_of_the_page_is_refused_in_its_words(words: str, answer: str, tmp_path: Path) -> None:
    whole, start = run(words.split(), place=tmp_path, code=2).out.rstrip("\n"), answer.strip()
    assert whole.startswith(start.removesuffix("…")) if start.endswith("…") else whole == start
