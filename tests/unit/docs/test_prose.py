"""The English of the pages keeps the rules of the house: short sentences, and pictures that are described."""

from __future__ import annotations

import re

import pytest

from support.english import findings_of_page, sentences_of_page
from support.pages import PAGES, name_of

OLD = {
    "explanation/batch-norm-and-buffers.md",
    "explanation/exchanges.md",
    "explanation/guarantees.md",
    "how-to/analyse-a-model.md",
    "how-to/simulate-a-cluster.md",
    "how-to/split-a-model.md",
}
"""Pages that were written before the rule. Those that are written again leave the list, and none comes to it."""
RULED = [page for page in PAGES if name_of(page) not in OLD and not name_of(page).startswith("benchmarks/")]
"""Pages whose prose is written by hand; what benchmarks note of themselves stands beside their numbers."""


@pytest.mark.parametrize("page", RULED, ids=name_of)
def test_a_page_breaks_no_rule_of_english(page) -> None:
    assert findings_of_page(page.read_text(encoding="utf-8")) == []


def test_the_list_of_old_pages_has_no_page_that_keeps_the_rules() -> None:
    old = {name_of(page): page for page in PAGES if name_of(page) in OLD}
    assert [name for name, page in old.items() if not findings_of_page(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_picture_is_described(page) -> None:
    text = page.read_text(encoding="utf-8")
    described = re.findall(r"!\[([^\]]*)\]\(", text) + re.findall(r'<img\b[^>]*\balt="([^"]*)"', text)
    assert len(described) == len(re.findall(r"!\[|<img\b", text))
    assert all(len(each.split()) > 4 for each in described)


def test_a_long_sentence_and_a_forbidden_word_are_found() -> None:
    long = "This sentence " + "goes on and on and on " * 5 + "until it ends."
    assert findings_of_page(f"# Title\n\nShort. {long}\n\n- It begins anew.\n") == [
        f"35 words: {long[:60]}",
        "anew: It begins anew.",
    ]


def test_code_tables_headings_and_addresses_are_no_sentences() -> None:
    left_out = "# A title\n\n| a | b |\n| - | - |\n\n```sh\nls\n```\n\n<!-- run -->\n"
    assert sentences_of_page(f"{left_out}See [the page](x.md) of `a b`. It is\nshort.\n") == [
        "See the page of X.",
        "It is short.",
    ]
