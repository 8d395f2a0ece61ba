"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "<!-- Made from the code by `make docs`: change the code, not this page. -->"
"""First line of every page that is made."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with an empty one behind it."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell(text) for text in line) + " |" for line in lines] + [""]


def cell(text: str) -> str:
    """Return a text as a cell of a table holds it."""
    return " ".join(text.replace("|", "\\|").split())


def sentence(text: str) -> str:
    """Return a text with a full stop at its end."""
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def page(title: str, introduction: str, lines: Sequence[str]) -> str:
    """Return a page."""
    return "\n".join([f"# {title}", "", GENERATED, "", introduction, "", *lines]).rstrip() + "\n"


def slug(heading: str) -> str:
    """Return the anchor of a heading that has letters, digits, dots, blanks and code."""
    return "".join(each for each in heading.lower() if each.isalnum() or each in "_- ").replace(" ", "-")
