"""The pages of docs/ are true and whole: types of sections, links, and commands as they can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestray.cli.app import app
from orchestray.trainers.aggregation.registry import AGGREGATIONS
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.few_bits.registry import QUANTIZATIONS
from orchestray.trainers.optim.registry import AVERAGES, BATCH_SCHEDULES, OPTIMIZERS, SCHEDULES
from orchestray.trainers.solvers.registry import SOLVERS
from orchestray.trainers.tasks.registry import TASKS
from support import pages
from support.pages import blocks, name_of

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "how-to").glob("*.md")))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *pages.PAGES]
REGISTRIES: dict[str, Iterable[str]] = {
    "optimizer": OPTIMIZERS,
    "solver": SOLVERS,
    "average": AVERAGES,
    "schedule": SCHEDULES,
    "batch schedule": BATCH_SCHEDULES,
    "compression": COMPRESSIONS,
    "aggregation": AGGREGATIONS,
    "quantization": QUANTIZATIONS,
    "task": TASKS,
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_page_says_what_every_type_of_a_section_is_for(kind: str) -> None:
    left_out = {"none", "mean"}
    assert [name for name in REGISTRIES[kind] if name not in left_out and f"`{name}`" not in HOW_TO] == []


def anchors(page: Path) -> set[str]:
    """Return GitHub's names for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place) if place else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"


def typed() -> list[list[str]]:
    """Return the words of every line of a shell block that calls orchestray."""
    lines = [
        line for page in PAGES for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()
    ]
    found = [re.search(r"(?:^|\$\()orchestray ([^)]*)", line) for line in lines]
    words = [shlex.split(match[1], comments=True) for match in found if match]
    return [line[: line.index("|")] if "|" in line else line for line in words]


@pytest.mark.parametrize("words", typed(), ids=" ".join)
def test_a_command_of_the_pages_parses(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    parent, rest = typer.Context(group, info_name="orchestray"), words
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(parent, rest)
        parent = typer.Context(group, info_name=name, parent=parent)
    group.make_context(name, rest)


def test_no_page_names_a_place_of_the_machine_it_was_written_on() -> None:
    for page in PAGES:
        assert not re.search(r"/(?:root|home|work|tmp)/", page.read_text(encoding="utf-8")), name_of(page)
