"""scripts/reference.py: docs/reference.md says what docstrings and signatures say. And one page lists all hooks."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import trainer
from trainer import Joined, ParallelModel

CHECKOUT = Path(__file__).resolve().parent.parent


def reference(checkout: Path, *words: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, checkout / "scripts" / "reference.py", *words], capture_output=True, text=True
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_reference_is_what_the_code_says() -> None:
    assert reference(CHECKOUT, "--check") == (0, "docs/reference.md is what the code says\n")


def test_every_name_that_a_lab_imports_has_its_section() -> None:
    sections = [line[3:] for line in (CHECKOUT / "docs" / "reference.md").read_text().splitlines() if line[:3] == "## "]
    assert set(trainer.__all__) <= set(sections)
    assert len(sections) == len(set(sections))  # a link to a name leads to one place


def rows(page: str, heading: str) -> set[str]:
    """What the first cells of the tables in a section say as code, without the heading of a table."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {code for cell in cells for code in re.findall("`([^`]+)`", cell)}


def public(kind: type) -> dict[str, object]:
    """What a class and those above it have for others, by name."""
    return {
        name: one
        for each in reversed(kind.__mro__[:-1])
        for name, one in vars(each).items()
        if not name.startswith("_") and (inspect.isfunction(one) or isinstance(one, property))
    }


def test_the_page_about_strategies_lists_each_of_their_methods() -> None:
    page = (CHECKOUT / "docs" / "own-strategy.md").read_text()
    said = rows(page, "Two classes")
    for kind, heading in (
        (Joined, "What you can override: `Strategy`"),
        (ParallelModel, "What you can override: `ParallelModel`"),
    ):
        own = public(kind)
        methods = {name: one for name, one in own.items() if inspect.isfunction(one)}
        calls = {name: ", ".join([*inspect.signature(one).parameters][1:]) for name, one in methods.items()}
        listed = {code for code in rows(page, heading) if code.endswith(")")}
        assert listed == {f"{name}({arguments})" for name, arguments in calls.items()}
        assert own.keys() - methods.keys() <= said


def test_a_docstring_that_has_changed_is_noticed(tmp_path: Path) -> None:
    for folder in ("trainer", "docs", "scripts"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    path = Path(*trainer.Task.__module__.split(".")).with_suffix(".py")
    task = tmp_path / path
    task.write_text(task.read_text().replace("def tokens(self, target: Any)", "def tokens(self, target: int)"))
    before = (tmp_path / "docs" / "reference.md").read_text()
    code, said = reference(tmp_path, "--check")
    assert (code, said.split(";")[0]) == (1, "docs/reference.md is not what the code says")
    assert (tmp_path / "docs" / "reference.md").read_text() == before
    assert reference(tmp_path)[0] == 0
    assert reference(tmp_path, "--check")[0] == 0
    assert "def tokens(target: int) -> int" in (tmp_path / "docs" / "reference.md").read_text()
