"""Write into the pages of docs/ what they quote: whole files, which tests run.

    python scripts/quote.py            every quote becomes what its file says now
    python scripts/quote.py --check    writes nothing; names the quotes that differ, and ends with 1 if there are any

In a page a quote is a line `<!-- quote PATH -->`, the path counted from the checkout, and the block of code behind it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": ""}  # of a block, by the file's ending; a command has no colours
QUOTE = re.compile(r"^<!-- quote (\S+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write, or compare; the exit code says whether pages and files agree."""
    parser = argparse.ArgumentParser(description="Write into the pages of docs/ what they quote.")
    parser.add_argument("--check", action="store_true", help="write nothing; name the quotes that differ")
    parser.add_argument("--checkout", type=Path, default=CHECKOUT, help="default: %(default)s")
    asked = parser.parse_args()
    wrong = []
    for page in sorted((asked.checkout / "docs").glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = QUOTE.sub(lambda found: quote(asked.checkout, found[1]), old)
        # a marker without a block behind it would quote nothing, and nobody would see
        if len(QUOTE.findall(new)) != new.count("<!-- quote "):
            sys.exit(f"docs/{page.name}: a quote is a line <!-- quote PATH --> with a block of code right behind it")
        wrong += differing(page.name, old, new)
        if not asked.check and new != old:
            page.write_text(new, encoding="utf-8")
    said = "differs from its file; python scripts/quote.py writes it anew" if asked.check else "written anew"
    print("\n".join(f"{place} {said}" for place in wrong) or "every quote is what its file says")
    sys.exit(1 if asked.check and wrong else 0)


def quote(checkout: Path, path: str) -> str:
    """A quote as it stands in a page; ends the program where there is no such file."""
    file = checkout / path
    if not file.is_file():
        sys.exit(f"<!-- quote {path} -->: there is no such file in {checkout}")
    return f"<!-- quote {path} -->\n```{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8').strip()}\n```"


def differing(page: str, old: str, new: str) -> list[str]:
    """Which quotes of a page are not what their files say."""
    pairs = zip(QUOTE.findall(old), QUOTE.findall(new), strict=True)
    return [f"docs/{page}: the quote of {path}" for (path, before), (_, now) in pairs if before != now]


if __name__ == "__main__":
    main()
