"""The papers of the project: one version, links that lead somewhere, quotes and a reference that are what files say."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trainer
from trainer import Joined, ParallelModel

CHECKOUT = Path(__file__).resolve().parent.parent
PAPERS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_all_papers_name_one_version() -> None:
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    released = re.findall(r"^## (\d\S*)", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version == trainer.__version__ == cited["version"] == released[0]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what the format requires


def anchors(page: Path) -> set[str]:
    """What a code host makes of the headings of a page: lower case, no punctuation, a dash for each space."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"\]\([^)]*\)", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_there(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


QUOTING = "Before.\n\n<!-- quote lab/net.yaml -->\n```yaml\n{}\n```\n\n```python\nnobody's\n```\n"


def quote(checkout: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(CHECKOUT / "scripts" / "quote.py"), "--checkout", str(checkout), *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def test_every_page_quotes_what_its_files_say() -> None:
    assert quote(CHECKOUT, "--check") == (0, "every quote is what its file says\n")


def test_a_quote_that_differs_is_named_and_written_anew(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "lab").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(QUOTING.format("width: 1"))
    (tmp_path / "lab" / "net.yaml").write_text("width: 2\n\ndepth: 3\n")
    code, said = quote(tmp_path, "--check")
    assert (code, said.split(";")[0]) == (1, "docs/page.md: the quote of lab/net.yaml differs from its file")
    assert page.read_text() == QUOTING.format("width: 1")
    assert quote(tmp_path)[0] == 0
    assert page.read_text() == QUOTING.format("width: 2\n\ndepth: 3")
    assert quote(tmp_path, "--check")[0] == 0


def test_the_reference_is_what_the_code_says() -> None:
    command = [sys.executable, CHECKOUT / "scripts" / "reference.py", "--check"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "docs/reference.md is what the code says\n"), ended.stderr


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
