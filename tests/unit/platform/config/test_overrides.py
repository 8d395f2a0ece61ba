"""Overrides of the command line are YAML, but for what YAML would misread."""

from __future__ import annotations

import pytest

from orchestray.platform.config.overrides import parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("::", "::"),
        ("::1", "::1"),
        ("fe80::", "fe80::"),
        ("{a: null}", {"a": None}),
        ("{a: 1}", {"a": 1}),
        ("3", 3),
    ],
)
def test_an_address_that_ends_in_colons_is_text(text: str, value: object) -> None:
    pairs, problems = parse([f"http.host={text}"])
    assert (pairs, problems) == ([(("http", "host"), value)], [])


@pytest.mark.parametrize(
    "text",
    [
        "file:///x/a (copy) #1/y",
        "#fff",
        "3 # three",
        "*.parquet",
        "&name",
        "@home",
        "%d",
        "`a`",
        "!important",
        "|",
        ">",
        "-",
        "?",
        "---",
        "a: b: c",
        "two\nlines",
        "# one\ntwo #2",
    ],
)
def test_a_value_without_quotes_is_taken_whole(text: str) -> None:
    assert parse([f"task.text={text}"]) == ([(("task", "text"), text)], [])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 1e-3 ", 1e-3),
        ("", None),
        ("null", None),
        ("true", True),
        ('"a #1"', "a #1"),
        ("{a: 'x #1'}", {"a": "x #1"}),
        ("{a: x#1}", {"a": "x#1"}),
        ("!!str 3", "3"),
        ("a: 1  # lines are YAML as in a file\nb: 2", {"a": 1, "b": 2}),
        ("|\n  a\n  b\n", "a\nb\n"),
        ("[1,  # one\n 2]", [1, 2]),
    ],
)
def test_numbers_quotes_brackets_and_several_lines_are_yaml(text: str, value: object) -> None:
    assert parse([f"task.text={text}"]) == ([(("task", "text"), value)], [])


@pytest.mark.parametrize("text", ["[a #1]", "{path: /x #1/y}", "{a: 1} # one", '"a" #1', "{color: #fff}"])
def test_a_comment_that_would_cut_a_value_is_refused(text: str) -> None:
    pairs, (problem,) = parse([f"task.text={text}"])
    assert not pairs
    assert "begins a comment, which would cut it; quote what is text" in problem.line("config")


@pytest.mark.parametrize("text", ["Report: second", "- a", "? a", "a: {b: 1}"])
def test_a_line_that_may_be_text_or_keys_is_refused(text: str) -> None:
    pairs, (problem,) = parse([f"task.text={text}"])
    assert not pairs
    assert "it may be text, or keys or a list; quote what is text" in problem.line("config")
