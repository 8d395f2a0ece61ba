"""The pages of docs/reference/ that are made from the code are those of this code, and leave nothing out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.reference.markdown import GENERATED
from builder.reference.pages import reference_pages
from builder.reference.run_directory import FILES
from orchestray.platform.run.directory import RunPaths
from orchestray.search.registry.methods import METHODS
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.optim.registry import OPTIMIZERS
from support.pages import DOCS


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return reference_pages()


def test_the_pages_are_those_that_the_code_makes(made: dict[str, str]) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")}
    stale = [name for name, text in made.items() if pages.get(name) != text]
    assert stale == [], "`make docs` writes them"
    assert {name for name, text in pages.items() if GENERATED in text} == set(made)


@pytest.mark.parametrize(
    ("page", "names"), [("methods", METHODS), ("optimizers", OPTIMIZERS), ("compressions", COMPRESSIONS)]
)
def test_a_page_has_a_heading_for_every_choice_of_a_registry(page: str, names: object, made: dict[str, str]) -> None:
    headings = re.findall(r"^### (\S+)$", made[page], flags=re.MULTILINE)
    assert set(names) <= set(headings)


def test_every_key_has_a_meaning(made: dict[str, str]) -> None:
    pages = [text for name, text in made.items() if name != "http"]  # the parts of a path have none
    rows = [row for page in pages for row in re.findall(r"^\| `.*\|$", page, flags=re.MULTILINE)]
    assert len(rows) > 700
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_file_of_a_run_directory_has_a_row(tmp_path: Path) -> None:
    files = [path.name for path in vars(RunPaths(tmp_path)).values() if isinstance(path, Path) and path != tmp_path]
    assert len(files) > 10
    assert {name for name in files if not name.startswith(".")} <= set(FILES)
