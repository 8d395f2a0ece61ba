"""Each block of code of a page is executed by a test, or a comment says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pages import PAGES, blocks, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_code_is_executed_or_marked(page: Path) -> None:
    assert [f"line {block.line}" for block in blocks(page) if block.is_unmarked] == []
    assert [f"line {block.line}" for block in blocks(page) if block.purpose == "not run" and not block.detail] == []


def test_a_block_without_a_mark_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nls\n```\n\n```text\na\n```\n\n<!-- run -->\n```sh\nls\n```\n", encoding="utf-8")
    assert [block.is_unmarked for block in blocks(page)] == [True, False, False]
