"""What mkdocs.yml calls while it builds docs/ as a site: links that work on a code host work there as well.

README.md and its neighbours become pages of the site. A link to any other file of the checkout becomes its path,
because a site does not contain it. Lists are nested by two spaces, as on a code host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

CHECKOUT = Path(__file__).resolve().parent.parent
DOCS = CHECKOUT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


class TwoSpaces(Extension):
    """Two spaces nest a list."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Set it before anything is parsed."""
        md.tab_length = 2


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension; mkdocs.yml can only name those that are installed."""
    extensions: list[Any] = config.markdown_extensions
    extensions.append(TwoSpaces())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in the pages that lie beside docs/."""
    for source, name in PAGES.items():
        text = (CHECKOUT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=relinked(text, CHECKOUT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page of docs/ to files beside docs/."""
    return markdown if page.file.src_uri in PAGES.values() else relinked(markdown, DOCS)


def relinked(text: str, folder: Path) -> str:
    """A page's text; what it links to is counted from this folder."""

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        target = (folder / path).resolve()
        if "://" in path or not target.exists():
            return found[0]  # of the web; a mistake, which mkdocs names
        if target.parent == DOCS:
            return f"[{words}]({target.name}{anchor})"
        if (place := str(target.relative_to(CHECKOUT))) in PAGES:
            return f"[{words}]({PAGES[place]}{anchor})"
        return f"`{place}`" if place.endswith(words.strip("`")) else f"{words} (`{place}`)"

    return LINK.sub(link, text)
