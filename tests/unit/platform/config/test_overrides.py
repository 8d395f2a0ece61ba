"""Overrides of the command line are YAML, but for what YAML would misread."""

from __future__ import annotations

import copy

import pytest
from pydantic import ConfigDict, Field

from orchestray.platform.config import overrides
from orchestray.platform.config.base import Section
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


class Free(Section):
    """A section with arguments of the user's."""

    model_config = ConfigDict(extra="allow")


class Whole(Section):
    """A config with such a section."""

    task: Free = Free()
    known: dict[str, int] = Field(default_factory=dict)


def test_the_longest_key_of_a_mapping_counts() -> None:
    data = {"task": {"scales": {"a.b": 1, "a.b.c": {"d.e": 2}, "a": {"b": 3}}}}
    for path, value in (("a.b", 10), ("a.b.c.d.e", 20)):
        keys = ("task", "scales", *path.split("."))
        assert overrides.apply(data, keys, value, Whole) is None
        assert overrides.find(data, keys) == value
    assert data == {"task": {"scales": {"a.b": 10, "a.b.c": {"d.e": 20}, "a": {"b": 3}}}}


@pytest.mark.parametrize("path", ["task.scales.a.x", "task.scales.b", "task.deep.0.scale", "task.scales.ab.c"])
def test_a_key_that_a_mapping_of_the_user_lacks_is_refused(path: str) -> None:
    data = {"task": {"scales": {"a.b": 1}, "deep": [{"scales": 1}]}}
    before = copy.deepcopy(data)
    problem = overrides.apply(data, tuple(path.split(".")), 2, Whole)
    assert problem is not None
    assert "is no key of task." in problem.text
    assert data == before


@pytest.mark.parametrize("path", ["task.more", "task.empty.a", "task.none.a.b", "task.new.a", "known.b"])
def test_arguments_of_the_user_and_keys_of_empty_mappings_may_be_new(path: str) -> None:
    data: dict[str, object] = {"task": {"empty": {}, "none": None}, "known": {"a": 1}}
    assert overrides.apply(data, tuple(path.split(".")), 2, Whole) is None
    assert overrides.find(data, tuple(path.split("."))) == 2


def test_paths_in_a_mapping_that_is_empty_or_missing_are_new_unless_one_of_them_is_the_mapping() -> None:
    data = {"task": {"empty": {}, "none": None, "full": {"a": 1}}, "known": {}}
    paths = ["task.empty.a", "task.none.a", "task.new.a", "known.b", "task.full.b", "task.more", "name"]
    new = overrides.in_empty(data, [tuple(path.split(".")) for path in paths])
    assert new == {tuple(path.split(".")) for path in paths[:4]}
    assert overrides.in_empty(data, [("task", "none"), ("task", "none", "a")]) == set()
