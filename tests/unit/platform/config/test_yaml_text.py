"""YAML as people mean it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.config import yaml_text

_TEXT = st.text(max_size=20)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT
_DATA = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1E+3", -1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        (".inf", float("inf")),
        ("010", 10),
        ("+3", 3),
        ("true", True),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-3'", "1e-3"),
        ("1e", "1e"),
        ("e3", "e3"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = yaml_text.read(text)
    assert read == value
    assert type(read) is type(value)


@settings(deadline=None)
@given(_DATA)
def test_what_is_written_is_read_back_by_us_and_by_readers_of_yaml_1_1(data: Any) -> None:
    text = yaml_text.write(data)
    assert yaml_text.read(text) == data
    assert yaml.safe_load(text) == data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: [1,", "line 2, column 7: expected the node content, but found '<stream end>'"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is there twice"),
        ("a: {b: 1, b: 2}", "line 1, column 11: the key 'b' is there twice"),
        ("\ta: 1", r"line 1, column 1: found character '\t' that cannot start any token"),
        ("{[1]: 2}", "line 1, column 2: found unhashable key"),
        ("a: 1\n---\na: 2", "line 2, column 1: expected a single document in the stream, but found another document"),
    ],
)
def test_a_mistake_is_said_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(yaml_text.YamlError) as caught:
        yaml_text.read(text)
    assert str(caught.value) == problem


def test_no_object_is_made_from_yaml() -> None:
    with pytest.raises(yaml_text.YamlError, match="could not determine a constructor"):
        yaml_text.read("!!python/object/apply:os.getcwd []")


def test_anchors_and_merges_work() -> None:
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}"
    assert yaml_text.read(text)["mine"] == {"a": 1, "b": 3}
