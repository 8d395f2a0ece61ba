"""Navigation of the site: the pages of each folder, in the order in which the folder's `index.md` links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SECTIONS = {
    "Tutorials": "tutorials",
    "How-to": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Benchmarks": "benchmarks",
}
"""Titles of the folders of docs/, in their order."""
LAST = ("gallery.md", "glossary.md")
"""Pages at the end."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
"""The file that a link of a page leads to."""


def navigation(docs: Path) -> list[Any]:
    """Return the navigation of a folder of pages, as the site's config takes it."""
    sections: list[Any] = [{title: pages_of(docs, folder)} for title, folder in SECTIONS.items()]
    return ["index.md", *sections, *LAST]


def pages_of(docs: Path, folder: str) -> list[str]:
    """Return the index of a folder, and the pages of the folder that it links to."""
    linked = LINK.findall((docs / folder / "index.md").read_text(encoding="utf-8"))
    own = [f"{folder}/{link}" for link in linked if "/" not in link and link.endswith(".md")]
    return [f"{folder}/index.md", *dict.fromkeys(own)]


def missing(docs: Path) -> list[str]:
    """Return the pages that no index links to."""
    found = {page for section in navigation(docs) for page in _pages(section)}
    return sorted({page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - found)


def _pages(section: str | dict[str, list[str]]) -> list[str]:
    return [section] if isinstance(section, str) else [page for pages in section.values() for page in pages]
