"""The English of docstrings and comments keeps the rules of the house."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from support.english import findings
from support.layers import FILES, ROOT


def broken_in(files: Iterable[Path]) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{line}: {rule}" for file in files for line, rule in findings(file)]


def test_docstrings_and_comments_of_the_product_break_no_rule() -> None:
    assert broken_in(FILES.values()) == []


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_docstrings_and_comments_of_benchmarks_and_tests_break_no_rule(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert broken_in(files) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('def f():\n    """What is there."""', "begins with 'What'"),
        ('def f():\n    """The parts."""', "begins with 'The'"),
        ('class A:\n    """Of a run."""', "begins with 'Of'"),
        ('class A:\n    """See the module."""', "says nothing"),
        ('x = 1\n"""Whether it is."""', "begins with 'Whether'"),
        ('def f():\n    """Return what it is told."""', "told"),
        ('def f():\n    """Return nothing where there is no file, anew."""', "anew"),
        ("x = 1  # this is no file", "comment: is no (is not a)"),
        (f'def f():\n    """Return {"very " * 30}much."""', "32 words"),
    ],
)
def test_a_text_that_breaks_a_rule_is_found(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"{text}\n")
    assert any(found.startswith(rule) for _, found in findings(file))


def test_plain_english_breaks_none(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        'class Queue:\n    """A queue of requests. It is empty where there is no request."""\n\n'
        '    size = 0\n    """Number of requests."""\n\n'
        '    @property\n    def is_full(self):\n        """True if no more requests fit."""\n\n'
        '    def put(self):\n        """Add a request.\n\n        Raises:\n            Full: none fits.\n        """\n'
    )
    assert findings(file) == []
