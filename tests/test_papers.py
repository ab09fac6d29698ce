"""The papers of the project: one version, links that lead somewhere, quotes and a reference that are what files say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trainer

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


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("quote.py", "every quote is what its file says\n"),
        ("reference.py", "docs/reference.md is what the code says\n"),
    ],
)
def test_pages_say_what_files_and_the_code_say(script: str, said: str) -> None:
    command = [sys.executable, str(CHECKOUT / "scripts" / script), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr


def test_every_name_that_a_lab_imports_has_its_section() -> None:
    sections = [line[3:] for line in (CHECKOUT / "docs" / "reference.md").read_text().splitlines() if line[:3] == "## "]
    assert set(trainer.__all__) <= set(sections)
    assert len(sections) == len(set(sections))  # a link to a name leads to one place
