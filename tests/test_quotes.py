"""scripts/quote.py: what the pages quote is what the files say."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = "Before.\n\n<!-- quote lab/net.yaml -->\n```yaml\n{}\n```\n\n```python\nnobody's\n```\n"


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
    page.write_text(PAGE.format("width: 1"))
    (tmp_path / "lab" / "net.yaml").write_text("width: 2\n\ndepth: 3\n")
    code, said = quote(tmp_path, "--check")
    assert (code, said.split(";")[0]) == (1, "docs/page.md: the quote of lab/net.yaml differs from its file")
    assert page.read_text() == PAGE.format("width: 1")
    assert quote(tmp_path)[0] == 0
    assert page.read_text() == PAGE.format("width: 2\n\ndepth: 3")
    assert quote(tmp_path, "--check")[0] == 0

    # nothing is left out in silence
    (tmp_path / "lab" / "net.yaml").unlink()
    assert quote(tmp_path, "--check") == (1, f"<!-- quote lab/net.yaml -->: there is no such file in {tmp_path}\n")
    page.write_text("<!-- quote lab/net.yaml -->\nwords between\n```yaml\n```\n")
    assert "right behind it" in quote(tmp_path, "--check")[1]
