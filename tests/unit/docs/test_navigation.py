"""The navigation of the site has every page."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.navigation import SECTIONS, missing, navigation

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Return a folder of pages in which each section is empty but for its index."""
    for folder in SECTIONS.values():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "index.md").write_text("# Section\n", encoding="utf-8")
    for name in ("index.md", "gallery.md", "glossary.md"):
        (tmp_path / name).write_text("# Page\n", encoding="utf-8")
    return tmp_path


def test_every_page_is_linked_from_the_index_of_its_folder() -> None:
    assert missing(DOCS) == []


def test_a_page_that_no_index_links_to_is_found(pages: Path) -> None:
    (pages / "how-to" / "lost.md").write_text("# Lost\n", encoding="utf-8")
    assert missing(pages) == ["how-to/lost.md"]


def test_pages_come_in_the_order_of_the_links_of_their_index(pages: Path) -> None:
    (pages / "how-to" / "index.md").write_text("[b](b.md#part) and [a](a.md), [b](b.md)\n", encoding="utf-8")
    assert navigation(pages)[2] == {"How-to": ["how-to/index.md", "how-to/b.md", "how-to/a.md"]}
